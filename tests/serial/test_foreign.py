"""What others have written: opened only if it is a file, read up to a bound, parsed and shown on one line."""

import os
import tracemalloc

import pytest

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import LONGEST_LINE, one_line, printable, readable, shown
from zero_mpi.files.open import (
    MOST_LINE,
    check_target,
    exists,
    is_file,
    is_folder,
    open_file,
    read_file,
    read_lines,
)
from zero_mpi.files.parse import parse_json, parse_toml


def test_control_letters_new_lines_and_halves_of_pairs_are_escapes():
    assert printable("a\nb\x1b[31m\u202e\ud800é漢") == r"a\nb\x1b[31m\u202e\ud800é漢"


@pytest.mark.parametrize("length", [199, 200, 201, 3_000_000])
def test_a_long_text_keeps_its_ends(length):
    text = shown("a" + "x" * (length - 2) + "z")
    assert len(text) == min(length, 200)
    assert text[0] + text[-1] == "az"
    assert ("..." in text) == (length > 200)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link to a device", "loop", "missing", "NUL"])
def test_only_a_regular_file_is_opened(tmp_path, kind):
    path = tmp_path / "it"
    made = {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link to a device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
    }
    made.get(kind, lambda: None)()
    place = {"device": "/dev/zero", "NUL": "a\0b"}.get(kind, path)
    with pytest.raises(FileError, match=r"expected a file|cannot be read|no such file"):
        open_file(place)


def test_no_more_is_read_than_the_bound(tmp_path):
    (tmp_path / "it").write_bytes(b"12345")
    assert read_file(tmp_path / "it", 5) == b"12345"
    with pytest.raises(FileError, match="at most 4 bytes, found more"):
        read_file(tmp_path / "it", 4)


BROKEN = {"nested": b"[" * 100_000, "long number": b"1" * 10_000, "infinite": b"1e999", "NaN": b"[NaN]"}
BROKEN |= {"not UTF-8": b'"\xff"', "cut": b'{"a": '}


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_is_no_json_is_one_kind_of_error_of_one_line(name):
    with pytest.raises(ValueError, match=r"^[^\n]{1,200}$"):
        parse_json(BROKEN[name])


def test_a_long_file_is_not_read_at_all(tmp_path):
    (tmp_path / "it").touch()
    os.truncate(tmp_path / "it", 1 << 40)
    tracemalloc.start()
    with pytest.raises(FileError, match="at most 33554432 bytes, found more"):
        read_file(tmp_path / "it", 32 << 20)
    assert read_file("/proc/self/status", 32 << 20), "a file that does not tell its length"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("raw", [b"[" + b"[]," * 3_000_000 + b"0]", b'{"a":' * 150 + b"1" + b"}" * 150])
def test_values_without_number_and_levels_without_end_are_refused(raw):
    """Before they are made: a value takes 100 bytes of memory; what walks through levels calls itself."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"more than 2097152 values|nested too deeply"):
        parse_json(raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(ValueError, match=r"nested too deeply|a key of more than 32 parts"):
        parse_toml(b".".join([b"a"] * 150) + b" = 1")


def test_a_line_is_one_line_of_bounded_length_and_so_is_each_word_of_it():
    text = f"a\nb {'x' * 3_000_000} {'long story ' * 1000} end"
    said = one_line(text)
    assert (said[:6], said[-4:], len(said)) == (r"a\nb x", " end", LONGEST_LINE)
    assert max(map(len, said.split())) <= 200


def test_a_text_keeps_its_layout_and_controls_nothing():
    assert readable("a\n\tb\u3000漢\u200dé\r\x1b[2J\u202e\ud800") == (
        "a\n\tb\u3000漢\u200dé" + r"\r\x1b[2J\u202e\ud800"
    )


def test_lines_are_read_within_bounds(tmp_path):
    (tmp_path / "it").write_bytes(
        b"one\n" + b"\0" * (3 * MOST_LINE) + b"\ntwo\n" + b"x" * (MOST_LINE - 1) + b"\nend"
    )
    lines = list(read_lines(tmp_path / "it", b""))
    assert [line[:4] for line in lines] == [b"one", b"two", b"xxxx", b"end"]
    os.truncate(tmp_path / "it", 8 << 30)
    with pytest.raises(FileError, match="found longer"):
        list(read_lines(tmp_path / "it", b""))


def test_lines_are_chosen_by_what_they_hold(tmp_path):
    long = b"x" * MOST_LINE
    (tmp_path / "it").write_bytes(
        b"\n".join([b"", b"a step", b"", long + b"step", b"step", b"st", b"ep"]) * 3
    )
    assert list(read_lines(tmp_path / "it", b"step")) == [b"a step", b"step"] * 3


@pytest.mark.parametrize(
    "raw",
    [
        b"a = " + b"[" * 100_000,
        b"a = ",
        b"\xff",
        b"a = " + b"1" * 10_000,
        b"a." * 500_000 + b"a = 1",  # tomllib takes minutes for it
        b"'a' . " * 100 + b"a = 1",
    ],
)
def test_whatever_is_no_toml_is_one_kind_of_error_of_one_line(raw):
    with pytest.raises(ValueError, match=r"^[^\n]{1,200}$"):
        parse_toml(raw)


@pytest.mark.parametrize("look", [exists, is_file, is_folder])
def test_what_the_system_refuses_to_say_is_no_answer(look, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", "x" * 300, "a\0b"):
        with pytest.raises(FileError, match=r"^[^\n]{1,300}: cannot be accessed: "):
            look(path)


def test_where_a_file_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "new", tmp_path / "file", "/dev/null"):
        check_target("--json", path)
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "no" / "file", "No such file or directory")):
        with pytest.raises(FileError, match=f"^--json {path}: cannot be written: {why}"):
            check_target("--json", path)
