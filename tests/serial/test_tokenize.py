"""Text into token files: the ids and documents that training reads of it, whatever goes wrong or stops."""

import errno
import gzip
import hashlib
import json
import os
import random
import re
import shutil

import numpy as np
import pytest
from bpe_files import trained_json, write_json

from zero_mpi import __version__
from zero_mpi.config.inputs import choose_tokenizer
from zero_mpi.config.settings import Config
from zero_mpi.data import ByteTokenizer, load_corpus
from zero_mpi.errors import JobError, UsageError
from zero_mpi.launch.folder_hold import RunLock
from zero_mpi.launch.stopping import START, signals
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.tokenize import encode_parts, progress, pulse
from zero_mpi.tokenize.command import command
from zero_mpi.tokenize.parts import cut_parts, dealt
from zero_mpi.tokenize.survey import described
from zero_mpi.tokenize.text_formats import JSON_LINES, Reading

EOS = ByteTokenizer.eos
TEXTS = ["def f(x):\n    return x\n", "ä 日本 " * 30, "x", "", "a\x00b", "the end\n" * 9]
SMALL = ("--part-mb", "0.001")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has not been told anything, in a folder of its own."""
    monkeypatch.setattr(signals, "caught", "")
    monkeypatch.setattr(signals, "phase", START)
    monkeypatch.setattr(pulse, "EVERY", 0.0)
    monkeypatch.chdir(tmp_path)
    yield
    log.remove()


def tokenize(*arguments, tokenizer="byte", out="out"):
    """The exit status of the command on this process."""
    world = World(0, 1)
    try:
        signals.phase = START
        return command(world, [*map(str, arguments), "--tokenizer", str(tokenizer), "--out", str(out)])
    finally:
        world.tell(0)


def arrow():
    return pytest.importorskip("pyarrow", reason="the package pyarrow is not installed", exc_type=ImportError)


def zstd(data):
    sink = arrow().BufferOutputStream()
    with arrow().CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def write_parquet(path, texts, rows=2, field="text"):
    library = arrow()
    import pyarrow.parquet

    table = library.table({"id": list(range(len(texts))), field: library.array(texts, library.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def files(out):
    """Name -> bytes of all files of a folder."""
    return {path.name: path.read_bytes() for path in out.iterdir()}


def documents(out):
    """The ids of each document of a folder, read as Megatron's IndexedDataset does."""
    found = []
    for path in sorted(out.glob("*.bin")):
        raw = path.with_suffix(".idx").read_bytes()
        assert (raw[:9], int.from_bytes(raw[9:17], "little")) == (b"MMIDIDX\0\0", 1)
        count = int.from_bytes(raw[18:26], "little")
        sizes, places = np.frombuffer(raw, "<i4", count, 34), np.frombuffer(raw, "<i8", count, 34 + 4 * count)
        assert np.frombuffer(raw[34 + 12 * count :], "<i8").tolist() == list(range(count + 1))
        dtype = {8: np.dtype("<u2"), 4: np.dtype("<i4")}[raw[17]]
        data = path.read_bytes()
        pairs = zip(places.tolist(), sizes.tolist(), strict=True)
        found += [np.frombuffer(data, dtype, size, place).tolist() for place, size in pairs]
    return found


def expected(texts):
    return [[*text.encode(), EOS] for text in texts if text]


# ------------------------------------------------------------------------------------------- formats


def write(kind, folder, field="text"):
    """The input of a format, which holds TEXTS in a field."""
    first, last = lines(TEXTS[:3], field), lines(TEXTS[3:], field)
    if kind == "parquet":
        return write_parquet(folder / "t.parquet", TEXTS, field=field)
    raw = lines(TEXTS, field)
    packed = {
        "jsonl": raw,
        "ndjson": raw.rstrip(b"\n").replace(b"\n", b"\r\n\n"),
        "jsonl.gz": gzip.compress(first) + gzip.compress(last),
        "jsonl.zst": lambda: zstd(first) + zstd(last),
    }[kind]
    path = folder / f"t.{kind}"
    path.write_bytes(packed() if callable(packed) else packed)
    return path


@pytest.mark.parametrize("field", ["text", "content"])
@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "jsonl.gz", "jsonl.zst", "parquet"])
def test_documents_of_each_format(kind, field, tmp_path):
    flags = () if field == "text" else (*SMALL, "--field", field)
    assert tokenize(write(kind, tmp_path, field), *flags) == 0
    assert documents(tmp_path / "out") == expected(TEXTS)


def test_files_of_text_are_a_document_each_packed_or_not(tmp_path):
    (tmp_path / "in").mkdir()
    inputs = {"a.txt": b"one", "b.txt.gz": gzip.compress(b"two"), "c.py.zst": zstd(b"three")}
    inputs |= {"d.jsonl": lines(["four", "five"]), "e.bin": b"\0\1", "f.tar.gz": gzip.compress(b"\0" * 600)}
    for name, data in inputs.items():
        (tmp_path / "in" / name).write_bytes(data)
    assert tokenize("in") == 0
    assert documents(tmp_path / "out") == expected(["one", "two", "three", "four", "five"])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [each["name"] for each in manifest["inputs"]] == ["a.txt", "b.txt.gz", "c.py.zst", "d.jsonl"]


def test_what_is_left_out_spelt_or_not_utf8_is_said(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name, data in {
        "a.txt": b"\xe9t\xe9",
        "b.txt": b"<|endoftext|>",
        "c.png": b"\x89PNG\r\n\x1a\n\0",
    }.items():
        (tmp_path / "in" / name).write_bytes(data)
    assert tokenize("in", tokenizer=bpe(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "files that are no text left out: 1 (c.png: a PNG image)" in said
    assert "text that is not UTF-8, taken byte by byte: 1 (a.txt)" in said
    assert "control tokens spelt in the text: 1 (<|endoftext|> 1)" in said
    assert said.splitlines()[-1].startswith("out: 2 documents, ")
    assert said.endswith("python -m zero_mpi.train --data out trains on them\n")


@pytest.mark.parametrize("packed", [False, True])
def test_lines_are_read_once_wherever_a_file_is_cut(packed, tmp_path, quick):
    """By a rank that has some of the pieces, in their order; also where a piece begins with a line."""
    draw = random.Random(5)
    texts = ["".join(draw.choices("ab\n ", k=draw.choice([0, 1, 5, 40]))) for _ in range(12)]
    raw = lines(texts)
    path = tmp_path / ("t.jsonl.gz" if packed else "t.jsonl")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    file = described(path.name, path)
    for size in range(1, len(raw) + 2, 7 if quick else 1):
        parts = cut_parts([file], [[len(raw)]], size)
        found = {}
        for share in dealt([part.weight for part in parts], 3):
            reading = Reading("text", False, None)
            for number in share:
                (piece,) = parts[number].pieces
                found[number] = list(JSON_LINES.texts(file, piece.first, piece.stop, reading))
            reading.close()
        read = [text for number in range(len(parts)) for _, text in found[number]]
        assert read == [text.encode() for text in texts], size


def test_parts_are_cut_by_the_input_and_dealt_out_whole():
    weights = [5, 1, 9, 9, 2, 7]
    for ranks in (1, 2, 3, 8):
        shares = dealt(weights, ranks)
        assert sorted(place for share in shares for place in share) == list(range(len(weights)))
        assert max(sum(weights[place] for place in share) for share in shares) <= sum(weights) / ranks + 9


# ------------------------------------------------------------------------------------- as training reads


def bpe(folder):
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)
    return write_json(folder, trained_json("gpt-2"))


def corpus(data, tokenizer, vocab, asked=None):
    return load_corpus(
        [str(data)], val_fraction=0, context=1, seed=0, tokenizer=tokenizer, vocab_size=vocab,
        control_tokens=asked,
    ).train  # fmt: skip


@pytest.mark.parametrize("asked", [None, "parse"])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_ids_and_documents_are_those_of_a_run_on_the_text(kind, asked, tmp_path):
    (tmp_path / "in").mkdir()
    for number, text in enumerate([*TEXTS, "a <|endoftext|> b"]):
        (tmp_path / "in" / f"{number}.txt").write_text(text.replace("\x00", ""))
    chosen = "byte" if kind == "byte" else bpe(tmp_path)
    assert tokenize("in", *SMALL, *(("--control-tokens", asked) if asked else ()), tokenizer=chosen) == 0
    config = Config(data=["out"], arch="llama")
    told = choose_tokenizer(config, None, None)
    by_flag = Config(data=["in"], arch="llama", tokenizer=str(chosen))
    assert told.vocab_size == choose_tokenizer(by_flag, None, None).vocab_size
    of_text = corpus("in", choose_tokenizer(by_flag, None, None), told.vocab_size, asked)
    of_tokens = corpus("out", told, told.vocab_size)
    assert of_tokens.ids.held().tolist() == of_text.ids.tolist()
    assert of_tokens.ids.dtype == of_text.ids.dtype
    assert of_tokens.ends.tolist() == of_text.ends.tolist()


def test_wide_ids(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("wide")
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 1 << 17)
    assert tokenize("t.txt") == 0
    assert (tmp_path / "out" / "00000.bin").read_bytes() == np.array([*b"wide", EOS], "<i4").tobytes()
    assert documents(tmp_path / "out") == expected(["wide"])


def test_the_flags_must_mean_the_tokens_of_the_folder(tmp_path):
    (tmp_path / "t.txt").write_text("some text")
    assert tokenize("t.txt") == 0
    told = choose_tokenizer(Config(data=["out"], arch="llama", tokenizer="byte"), None, None)
    assert told.metadata()["tokenizer.ggml.tokens"] == ByteTokenizer().metadata()["tokenizer.ggml.tokens"]
    assert choose_tokenizer(Config(data=["out"], arch="llama", vocab_size=260), None, None).vocab_size == 260
    with pytest.raises(UsageError, match=r"--vocab-size 300: out/tokenizer.gguf has 260 tokens"):
        choose_tokenizer(Config(data=["out"], arch="llama", vocab_size=300), None, None)
    other = bpe(tmp_path)
    with pytest.raises(
        UsageError, match=r"--tokenizer .* has another tokenizer than made the token files: exp"
    ):
        choose_tokenizer(Config(data=["out"], arch="llama", tokenizer=str(other)), None, None)
    assert tokenize("t.txt", tokenizer=other, out="other") == 0
    with pytest.raises(UsageError, match=r"--data has another tokenizer than made the token files"):
        choose_tokenizer(Config(data=["out", "other"], arch="llama"), None, None)
    (tmp_path / "out" / ".tokenize").mkdir()
    assert choose_tokenizer(Config(data=["out"], arch="llama"), None, None).vocab_size == 260
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(
        UsageError, match=r"--data out: not all of its token files are written: run zero_mpi.tok"
    ):
        choose_tokenizer(Config(data=["out"], arch="llama"), None, None)


# ------------------------------------------------------------------------------------------- the manifest


def test_the_manifest_says_what_there_is(long, tmp_path):
    assert tokenize(long, *SMALL) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    inputs, made = manifest.pop("inputs"), manifest.pop("files")
    raw = long.read_bytes()
    sha256 = hashlib.sha256(raw).hexdigest()
    assert inputs == [{"name": long.name, "format": "JSON Lines", "bytes": len(raw), "sha256": sha256}]
    there = {name: data for name, data in files(tmp_path / "out").items() if name[0].isdigit()}
    assert len(there) > 6
    assert {each["name"]: (each["bytes"], each["sha256"]) for each in made} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in there.items()
    }
    size = sum(len(json.loads(line)["text"]) for line in raw.splitlines())
    assert manifest == {
        "zero_mpi": __version__,
        "tokenizer": {
            "file": "tokenizer.gguf",
            "kind": "byte",
            "vocabulary": 260,
            "digest": "byte",
            "closes_documents": EOS,
        },
        "options": {"field": "text", "skip_bad": False, "control_tokens": None, "part_mb": 0.001},
        "ids": "uint16",
        "documents": 60,
        "tokens": size + 60,
        "text_bytes": size,
        "skipped": 0,
    }


# ------------------------------------------------------------------------------------------------ errors

BAD = [
    (b'{"text": "a"}\n\n{"tex": "b"}\n', 3, "expected the field 'text', found 'tex'; --field names it"),
    (b'{"text": "a"}\n{"text": 5}\n', 2, "text: expected a text, found 5"),
    (b'{"text": "\\ud800"}\n', 1, "text: expected a text, found"),
    (b'{"text": null}\n', 1, "text: expected a text, found None"),
    (b'["text"]\n', 1, r"expected an object with 'text', found \['text'\]"),
    (b'{"text": "a"}\n{"text": \n', 2, "Expecting value"),
    (b'{"text": "a"}\n\xff\n', 2, "not UTF-8"),
    (b'{"text": "a"}\n' + b"[" * 4000 + b"\n", 2, "nested too deeply"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("raw", "line", "problem"), BAD)
def test_a_line_in_error_is_named_or_left_out(raw, line, problem, packed, tmp_path):
    path = tmp_path / ("t.jsonl.gz" if packed else "t.jsonl")
    good = lines([f"good {number}" for number in range(200)])
    path.write_bytes(gzip.compress(good + raw + good) if packed else good + raw + good)
    with pytest.raises(
        UsageError, match=rf"{path}, line {200 + line}: {problem}.*; --skip-bad leaves out such"
    ):
        tokenize(path, *SMALL)
    assert tokenize(path, *SMALL, "--skip-bad") == 0, "it goes on: what was complete had none"
    kept = ["a"] * (b'"a"' in raw)
    texts = [f"good {number}" for number in range(200)]
    assert documents(tmp_path / "out") == expected([*texts, *kept, *texts])
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"] == 1


def test_a_line_that_is_too_long_is_named_or_left_out(tmp_path, monkeypatch):
    for name in ("files.text_streams", "tokenize.text_formats"):
        monkeypatch.setattr(f"zero_mpi.{name}.MOST", 100)
    (tmp_path / "t.jsonl").write_bytes(lines(["a", "b" * 1000, "c"]))
    with pytest.raises(UsageError, match=r"line 2: expected at most 100 bytes, found more"):
        tokenize("t.jsonl")
    assert tokenize("t.jsonl", "--skip-bad") == 0
    assert documents(tmp_path / "out") == expected(["a", "c"])


def test_rows_of_parquet_without_a_text(tmp_path):
    write_parquet(tmp_path / "t.parquet", ["a", "b", "c", None, "d"])
    with pytest.raises(UsageError, match=r"t.parquet, row 4: text: expected a text, found None; --skip-bad"):
        tokenize("t.parquet", *SMALL)
    assert tokenize("t.parquet", "--skip-bad", out="other") == 0
    assert documents(tmp_path / "other") == expected("abcd")
    with pytest.raises(UsageError, match=r"expected a column 'body', found id, text; --field names it"):
        tokenize("t.parquet", "--field", "body", out="third")
    with pytest.raises(UsageError, match=r"id: expected a column of texts, found int64"):
        tokenize("t.parquet", "--field", "id", out="third")


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("t.jsonl.gz", gzip.compress(lines(TEXTS))[:-9], "t.jsonl.gz: cannot be read: Compressed file ended"),
        ("t.jsonl.gz", lines(TEXTS), "t.jsonl.gz: cannot be read: Not a gzipped file"),
        ("t.txt.gz", b"\x1f\x8b\x08\0" + b"\xff" * 40, "t.txt.gz: cannot be read: "),
        ("t.jsonl.zst", lambda: zstd(lines(TEXTS))[:-5], "t.jsonl.zst: cannot be read: "),
        ("t.jsonl.zst", lambda: lines(TEXTS), "t.jsonl.zst: cannot be read: "),
        ("t.parquet", lambda: arrow() and lines(TEXTS), "t.parquet: cannot be read as Parquet: "),
        ("t.txt", b"\0", "TEXT .*t.txt looks like binary data, which is no text"),
        ("t.txt", b"", "TEXT holds no text: .*t.txt"),
        ("t.jsonl", b"\n\n", "TEXT holds no text: .*t.jsonl"),
    ],
)
def test_an_input_that_cannot_be_read_is_one_line(name, data, problem, tmp_path):
    (tmp_path / name).write_bytes(data() if callable(data) else data)
    with pytest.raises(UsageError, match=problem):
        tokenize(tmp_path / name, tokenizer=bpe(tmp_path))
    (tmp_path / "other.txt").write_text("other")
    assert tokenize("other.txt") == 0, "nothing was complete, so nothing binds"


def test_paths_that_cannot_be_meant(tmp_path):
    with pytest.raises(UsageError, match=r"TEXT none.txt does not exist"):
        tokenize("none.txt")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "t.txt").write_text("text")
    with pytest.raises(UsageError, match=r"--out in/out: lies in TEXT in: use a folder beside it"):
        tokenize("in", out="in/out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(UsageError, match=r"--out out: expected an empty folder, .* found 'mine' there"):
        tokenize("in")
    with pytest.raises(UsageError, match=r"--part-mb 0: expected 0.001 to 16384"):
        tokenize("in", "--part-mb", "0")


def test_a_packed_text_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("zero_mpi.tokenize.text_formats.MOST_UNPACKED", 100)
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(b"a" * 101))
    with pytest.raises(
        UsageError, match=r"expected a text of at most 100 bytes, which is one document, found"
    ):
        tokenize("t.txt.gz")


def test_two_jobs_in_one_folder(tmp_path):
    (tmp_path / "t.txt").write_text("text")
    (tmp_path / "out").mkdir()
    lock = RunLock.take(tmp_path / "out")
    try:
        with pytest.raises(UsageError, match=r"--out out: another job is at work in this folder"):
            tokenize("t.txt")
    finally:
        lock.release()


# --------------------------------------------------------------------------------------------- to go on


def stop_after(monkeypatch, parts):
    """Let a signal come when so many parts are complete."""
    written = encode_parts.PartWriter.finish
    left = [parts]

    def finish(self, about):
        written(self, about)
        left[0] -= 1
        if not left[0]:
            signals.caught = "SIGTERM"

    monkeypatch.setattr(encode_parts.PartWriter, "finish", finish)


@pytest.fixture
def long(tmp_path):
    """A file of which five or six parts are made."""
    path = tmp_path / "long.jsonl"
    path.write_bytes(lines([f"{number} " * 20 for number in range(60)]))
    return path


def test_a_job_that_was_stopped_goes_on_with_what_is_missing(long, tmp_path, monkeypatch, capsys):
    assert tokenize(long, *SMALL, out="whole") == 0
    count = len(list((tmp_path / "whole").glob("*.bin")))
    assert count > 3
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert tokenize(long, *SMALL) == 75
    assert f"stopped: 2 of {count} parts are complete; the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "out" / "manifest.json").exists()
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.bin")}
    for leftover in (
        ".tokenize/00003.bin",
        ".tokenize/.00003.json.partial",
        ".manifest.json.partial",
        "00004.idx",
    ):
        (tmp_path / "out" / leftover).write_bytes(b"half")
    signals.caught = ""
    assert tokenize(long, *SMALL) == 0
    assert f"{count - 2} parts to write of {count}, from 1 file\n" in capsys.readouterr().out
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    after = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.bin")}
    assert len(before) == 2
    assert before.items() <= after.items(), "what was complete stays"


def test_what_a_job_left_that_had_completed_nothing_goes(long, tmp_path):
    """Other flags may follow it, and the pair that it had just named is of no use then."""
    assert tokenize(long, *SMALL, out="whole") == 0
    (tmp_path / "out" / ".tokenize").mkdir(parents=True)
    for leftover in (".tokenize/plan.json", "00077.bin", "00077.idx", "tokenizer.gguf"):
        (tmp_path / "out" / leftover).write_bytes(b"half")
    assert tokenize(long, *SMALL) == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_part_that_is_not_what_its_record_says_is_written_again(long, tmp_path, monkeypatch):
    assert tokenize(long, *SMALL, out="whole") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert tokenize(long, *SMALL) == 75
    (tmp_path / "out" / "00000.bin").write_bytes(b"cut")
    (tmp_path / "out" / ".tokenize" / "00001.json").write_bytes(b'{"files": 7}')
    (tmp_path / "out" / "00002.idx").unlink()
    signals.caught = ""
    assert tokenize(long, *SMALL) == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_folder_that_was_begun_with_others_is_refused(is_complete, long, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 99 if is_complete else 2)
        assert tokenize(long, *SMALL) == (0 if is_complete else 75)
    signals.caught = ""
    raw, other = long.read_bytes(), tmp_path / "other.jsonl"
    other.write_bytes(lines(["other"]))

    def refused(problem, *arguments, **options):
        with pytest.raises(
            UsageError, match=rf"--out out was begun with other input: {problem}.*start with the"
        ):
            tokenize(*arguments, **options)

    refused("field was 'text', is now 'body'", long, *SMALL, "--field", "body")
    refused("part-mb was 0.001, is now 0.002", long, "--part-mb", "0.002")
    refused("control-tokens was None, is now 'parse'", long, *SMALL, "--control-tokens", "parse")
    refused("kind was 'byte', is now 'gpt2'", long, *SMALL, tokenizer=bpe(tmp_path))
    refused("the number of inputs was 1, is now 2", long, other, *SMALL)
    refused("name of the input 'other.jsonl' was 'long.jsonl', is now 'other.jsonl'", other, *SMALL)
    long.write_bytes(raw + b"\n")
    refused(f"bytes of the input 'long.jsonl' was {len(raw)}, is now {len(raw) + 1}", long, *SMALL)
    long.write_bytes(raw.replace(b"59", b"58"))
    refused("sha256 of the input 'long.jsonl' was", long, *SMALL)
    long.write_bytes(raw)
    os.utime(long, (1, 1))  # another time is another look, and no other text
    assert tokenize(long, *SMALL) == 0
    assert is_complete == ("out was complete: mpirun" in capsys.readouterr().out)


def test_an_input_that_changes_under_the_work_ends_it(long, monkeypatch):
    written = encode_parts.PartWriter.add

    def add(self, name, ids):
        written(self, name, ids)
        long.write_bytes(lines(["other"]))

    monkeypatch.setattr(encode_parts.PartWriter, "add", add)
    with pytest.raises(JobError, match=r"long.jsonl changed while it was read"):
        tokenize(long)


def test_records_that_lie_are_one_line(long, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert tokenize(long, *SMALL) == 75
    signals.caught = ""
    plan = tmp_path / "out" / ".tokenize" / "plan.json"
    for raw in (b"", b"[]", b"{}", b'{"about": {}, "looked": 5}', b'{"about": 7}'):
        plan.write_bytes(raw)
        with pytest.raises(
            UsageError, match=r"expected what tokenize wrote, found|was begun with other input"
        ):
            tokenize(long, *SMALL)


WRONG = (-1, 1 << 70, 0.5, None, "x", [], {}, [{}])


def with_wrong_values(value, path=()):
    """(where, the value with another one there) for each place of a JSON value, of lists the first one."""
    yield from ((path, wrong) for wrong in WRONG if wrong != value)
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:1] if isinstance(value, list) else ())
    )
    for key, item in inner:
        for where, changed in with_wrong_values(item, (*path, key)):
            copy = value.copy()
            copy[key] = changed
            yield where, copy


@pytest.mark.parametrize("name", ["manifest.json", ".tokenize/plan.json", ".tokenize/00000.json"])
def test_a_wrong_value_anywhere_in_a_file_of_ours_is_one_line_or_of_no_use(name, long, tmp_path, monkeypatch):
    """It is refused, or the folder has the same token files in the end."""

    def tokens(found):
        return {name: raw for name, raw in found.items() if name.endswith((".bin", ".idx"))}

    assert tokenize(long, *SMALL, out="whole") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 99 if name == "manifest.json" else 2)
        tokenize(long, *SMALL, out="before")
    whole = files(tmp_path / "whole")
    for where, value in with_wrong_values(json.loads((tmp_path / "before" / name).read_text())):
        shutil.rmtree("out", ignore_errors=True)
        shutil.copytree("before", "out")
        (tmp_path / "out" / name).write_text(json.dumps(value))
        signals.caught = ""
        refused = ""
        try:
            assert tokenize(long, *SMALL) == 0, where
        except UsageError as error:
            refused = str(error)
        assert "\n" not in refused
        assert "out" in refused or tokens(files(tmp_path / "out")) == tokens(whole), (where, value)


def test_parts_that_are_gone_at_the_end_are_one_line(long, monkeypatch):
    monkeypatch.setattr("zero_mpi.tokenize.work_folder.read_record", lambda out, name: None)
    with pytest.raises(JobError, match="out"):
        tokenize(long, *SMALL)


def test_a_disk_that_is_full_is_one_line_and_no_end_of_the_work(long, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert tokenize(long, *SMALL, out="whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(encode_parts.PartWriter, "finish", lambda self, about: full(0))
        with pytest.raises(JobError, match=r"cannot write .*: No space left on device"):
            tokenize(long, *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr("zero_mpi.tokenize.part_files.os.fsync", full)
        with pytest.raises(JobError, match=r"cannot write out/.*: No space left on device"):
            tokenize(long, *SMALL)
    assert tokenize(long, *SMALL) == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


# ---------------------------------------------------------------------------------------------- progress


def test_a_person_sees_a_bar_and_a_log_a_line_a_minute(long, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert tokenize(long, *SMALL) == 0
    line = r"(?m)^100 %  60 documents  3.46k tokens  [\d.]+ MB/s  00:00 left$"
    said = capsys.readouterr().out
    assert re.search(line, said)
    assert re.search(r"(?m)^100 %  of the files looked at  [\d.]+ MB/s  00:00 left$", said)
    monkeypatch.setattr(progress, "watched", lambda: True)
    assert tokenize(long, *SMALL, out="other") == 0
    seen = capsys.readouterr()
    assert re.search(r"100%\|.*\| 60 documents, 3.46k tokens, [\d.]+ MB/s, 00:00 left", seen.err)
    assert "MB/s" not in seen.out
