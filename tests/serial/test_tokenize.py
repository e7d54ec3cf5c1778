"""Token files have the ids and documents that training reads from the text, even after errors and stops."""

import codecs
import errno
import gzip
import hashlib
import json
import os
import random

import fuzz_texts
import numpy as np
import pytest
from bpe_files import trained_json, write_json
from corpora import load_corpus

from zero_mpi import __version__
from zero_mpi.commands.tokenize import encode_parts
from zero_mpi.commands.tokenize.command import command, input_files
from zero_mpi.commands.tokenize.encode_parts import JSON_LINES, InputFile, Reading, cut_parts, deal
from zero_mpi.config.inputs import choose_tokenizer
from zero_mpi.config.settings import Config
from zero_mpi.data import ByteTokenizer
from zero_mpi.data.text_files import library_files
from zero_mpi.errors import JobError, UsageError
from zero_mpi.launch.folder_lock import RunLock
from zero_mpi.launch.stopping import START, signals
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log

EOS = ByteTokenizer.eos
TEXTS = ["def f(x):\n    return x\n", "ä 日本 " * 30, "x", "", "a\x00b", "the end\n" * 9]
SMALL = ("--part-mb", "0.001")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Reset signals and change to an empty folder."""
    monkeypatch.setattr(signals, "name", "")
    monkeypatch.setattr(signals, "phase", START)
    monkeypatch.setattr(encode_parts, "EVERY", 0.0)
    monkeypatch.chdir(tmp_path)
    yield
    log.remove()


def tokenize(*arguments, tokenizer="byte", out="out"):
    """Run the command in this process; return its exit status."""
    world = World(0, 1)
    try:
        signals.phase = START
        return command(world, [*map(str, arguments), "--tokenizer", str(tokenizer), "--out", str(out)])
    finally:
        world.report_end(0)


def arrow():
    return pytest.importorskip("pyarrow", reason="the package pyarrow is not installed", exc_type=ImportError)


def zstd(data):
    arrow()  # skips the test without pyarrow
    return fuzz_texts.zstd(data)


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def write_parquet(path, texts, field="text"):
    library = arrow()
    import pyarrow.parquet

    table = library.table({"id": list(range(len(texts))), field: library.array(texts, library.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


def files(out):
    """Return name -> bytes of all files of a folder."""
    return {path.name: path.read_bytes() for path in out.iterdir()}


def documents(out):
    """Return the ids of each document of a folder, read as Megatron's IndexedDataset does."""
    rows = []
    for path in sorted(out.glob("*.bin")):
        raw = path.with_suffix(".idx").read_bytes()
        assert (raw[:9], int.from_bytes(raw[9:17], "little")) == (b"MMIDIDX\0\0", 1)
        count = int.from_bytes(raw[18:26], "little")
        sizes, places = np.frombuffer(raw, "<i4", count, 34), np.frombuffer(raw, "<i8", count, 34 + 4 * count)
        assert np.frombuffer(raw[34 + 12 * count :], "<i8").tolist() == list(range(count + 1))
        dtype = {8: np.dtype("<u2"), 4: np.dtype("<i4")}[raw[17]]
        data = path.read_bytes()
        pairs = zip(places.tolist(), sizes.tolist(), strict=True)
        rows += [np.frombuffer(data, dtype, size, place).tolist() for place, size in pairs]
    return rows


def expected(texts):
    return [[*text.encode(), EOS] for text in texts if text]


def write(kind, folder, field="text"):
    """Write TEXTS as one field of an input file in the given format."""
    first, last = lines(TEXTS[:3], field), lines(TEXTS[3:], field)
    if kind == "parquet":
        return write_parquet(folder / "t.parquet", TEXTS, field=field)
    raw = lines(TEXTS, field)
    packed = {
        "jsonl": raw,
        "bom.jsonl": codecs.BOM_UTF8 + raw,
        "ndjson": raw.rstrip(b"\n").replace(b"\n", b"\r\n\n"),
        "jsonl.gz": gzip.compress(first) + gzip.compress(last),
        "jsonl.zst": lambda: zstd(first) + zstd(last),
    }[kind]
    path = folder / f"t.{kind}"
    path.write_bytes(packed() if callable(packed) else packed)
    return path


@pytest.mark.parametrize("field", ["text", "content"])
@pytest.mark.parametrize("kind", ["jsonl", "bom.jsonl", "ndjson", "jsonl.gz", "jsonl.zst", "parquet"])
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


def test_files_left_out_spelt_tokens_and_other_encodings_are_named(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name, data in {
        "a.txt": b"\xe9t\xe9",
        "b.txt": b"<|endoftext|>",
        "c.png": b"\x89PNG\r\n\x1a\n\0",
    }.items():
        (tmp_path / "in" / name).write_bytes(data)
    assert tokenize("in", tokenizer=bpe(tmp_path)) == 0
    output = capsys.readouterr().out
    assert all(named in output for named in ("1 (c.png", "1 (a.txt", "<|endoftext|> 1", "out: 2 documents"))


@pytest.mark.parametrize("packed", [False, True])
def test_lines_are_read_once_wherever_a_file_is_cut(packed, tmp_path, quick):
    """Each rank takes some parts, in order, and parts begin at any line."""
    draw = random.Random(5)
    texts = ["".join(draw.choices("ab\n ", k=draw.choice([0, 1, 5, 40]))) for _ in range(12)]
    raw = lines(texts)
    path = tmp_path / ("t.jsonl.gz" if packed else "t.jsonl")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    file = InputFile(path.name, path, "JSON Lines", path.stat().st_size, 0)
    for size in range(1, len(raw) + 2, 7 if quick else 1):
        parts = cut_parts([file], [[len(raw)]], size)
        rows = {}
        for share in deal([part.weight for part in parts], 3):
            reading = Reading("text", False, None)
            for number in share:
                (piece,) = parts[number].pieces
                rows[number] = list(JSON_LINES.texts(file, piece.first, piece.stop, reading))
            reading.close()
        read = [text for number in range(len(parts)) for _, text in rows[number]]
        assert read == [text.encode() for text in texts], size


def bpe(folder):
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)
    return write_json(folder, trained_json("gpt-2"))


def corpus(data, tokenizer, vocab, control=None):
    return load_corpus(
        [str(data)], val_fraction=0, context=1, seed=0, tokenizer=tokenizer, vocab_size=vocab,
        control_tokens=control,
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
    tokenizer = choose_tokenizer(config, None, None)
    by_flag = Config(data=["in"], arch="llama", tokenizer=str(chosen))
    assert tokenizer.vocab_size == choose_tokenizer(by_flag, None, None).vocab_size
    of_text = corpus("in", choose_tokenizer(by_flag, None, None), tokenizer.vocab_size, asked)
    of_tokens = corpus("out", tokenizer, tokenizer.vocab_size)
    assert of_tokens.ids.read_all().tolist() == of_text.ids.tolist()
    assert of_tokens.ids.dtype == of_text.ids.dtype
    assert of_tokens.ends.tolist() == of_text.ends.tolist()


def test_the_flags_must_mean_the_tokens_of_the_folder(tmp_path):
    def chosen(*data, **flags):
        return choose_tokenizer(Config(data=list(data), arch="llama", **flags), None, None)

    (tmp_path / "t.txt").write_text("some text")
    other = bpe(tmp_path)
    assert tokenize("t.txt") == tokenize("t.txt", tokenizer=other, out="other") == 0
    names = [chosen("out", tokenizer="byte").metadata(), ByteTokenizer().metadata()]
    assert names[0]["tokenizer.ggml.tokens"] == names[1]["tokenizer.ggml.tokens"]
    assert chosen("out", vocab_size=260).vocab_size == 260
    for data, flags, named in (
        (["out"], {"vocab_size": 300}, "--vocab-size 300: out/tokenizer.gguf .*260"),
        (["out"], {"tokenizer": str(other)}, "--tokenizer"), (["out", "other"], {}, "--data"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=named):
            chosen(*data, **flags)
    with pytest.raises(UsageError, match=r"--data .*other/"):
        chosen("t.txt", val_data=["other"])
    assert chosen("t.txt", val_data=["out"]).vocab_size == chosen("out=1", val_data=["out"]).vocab_size
    (tmp_path / "out" / ".tokenize").mkdir()
    assert chosen("out").vocab_size == 260
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(UsageError, match="--data out"):
        chosen("out")
    with pytest.raises(UsageError, match="--val-data out"):
        chosen("t.txt", val_data=["out"])


def test_the_manifest_tells_inputs_settings_and_files(long, tmp_path):
    assert tokenize(long, *SMALL) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    inputs, outputs = manifest.pop("inputs"), manifest.pop("files")
    raw = long.read_bytes()
    sha256 = hashlib.sha256(raw).hexdigest()
    assert inputs == [{"name": long.name, "format": "JSON Lines", "bytes": len(raw), "sha256": sha256}]
    parts = {name: data for name, data in files(tmp_path / "out").items() if name[0].isdigit()}
    assert len(parts) > 6
    assert {each["name"]: (each["bytes"], each["sha256"]) for each in outputs} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in parts.items()
    }
    size = sum(len(json.loads(line)["text"]) for line in raw.splitlines())
    facts = {"kind": "byte", "vocabulary": 260, "digest": "byte", "closes_documents": EOS}
    assert manifest == {
        "zero_mpi": __version__, "tokenizer": {"file": "tokenizer.gguf", **facts}, "ids": "uint16",
        "options": {"field": "text", "skip_bad": False, "control_tokens": None, "part_mb": 0.001},
        "documents": 60, "tokens": size + 60, "text_bytes": size, "skipped": 0,
    }  # fmt: skip


BAD = [
    (b'{"text": "a"}\n\n{"tex": "b"}\n', 3, "'tex'"),
    (b'{"text": "a"}\n{"text": 5}\n', 2, "5"),
    (b'{"text": "a"}\n{"text": \n', 2, ""),
    (b'{"text": "a"}\n\xff\n', 2, "UTF-8"),
    (b'{"text": "a"}\n' + b"[" * 4000 + b"\n", 2, "nested"),
    (b'{"text": "a"}\n{"text": "' + b"b" * 4000 + b'"}\n', 2, "3,000 bytes"),
]


@pytest.mark.parametrize(("raw", "line", "problem"), BAD)
def test_a_line_in_error_is_named_or_left_out(raw, line, problem, tmp_path, monkeypatch):
    packed = line == 2
    if problem == "3,000 bytes":
        monkeypatch.setattr("zero_mpi.files.text_streams.MOST", 3000)
    path = tmp_path / ("t.jsonl.gz" if packed else "t.jsonl")
    texts = [f"good {number}" for number in range(200)]
    good = lines(texts)
    path.write_bytes(gzip.compress(good + raw + good) if packed else good + raw + good)
    with pytest.raises(UsageError, match=rf"{path}, line {200 + line}: .*{problem}.*--skip-bad"):
        tokenize(path, *SMALL)
    assert tokenize(path, *SMALL, "--skip-bad") == 0, "complete parts had no bad rows"
    assert documents(tmp_path / "out") == expected([*texts, *["a"] * (b'"a"' in raw), *texts])
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"] == 1


def test_rows_of_parquet_without_a_text(tmp_path):
    write_parquet(tmp_path / "t.parquet", ["a", "b", "c", None, "d"])
    with pytest.raises(UsageError, match=r"t.parquet, row 4: .*None.*--skip-bad"):
        tokenize("t.parquet", *SMALL)
    assert tokenize("t.parquet", "--skip-bad", out="other") == 0
    assert documents(tmp_path / "other") == expected("abcd")
    for field, names in (("body", "id, text"), ("id", "int64")):
        with pytest.raises(UsageError, match=rf"t.parquet.*{field}.*{names}"):
            tokenize("t.parquet", "--field", field, out="third")


UNREADABLE = [
    ("t.jsonl.gz", gzip.compress(lines(TEXTS))[:-9]),
    ("t.txt.gz", gzip.compress(b"a" * 101)),  # more than MOST_UNPACKED
    ("t.jsonl.zst", lambda: zstd(lines(TEXTS))[:-5]),
    ("t.jsonl.zst", lambda: arrow() and lines(TEXTS)),
    ("t.parquet", lambda: arrow() and lines(TEXTS)),
    ("t.txt", b"\0"),
    ("t.jsonl", b"\n\n"),
]


@pytest.mark.parametrize(("name", "data"), UNREADABLE)
def test_an_input_that_cannot_be_read_is_one_line(name, data, tmp_path, monkeypatch):
    monkeypatch.setattr("zero_mpi.files.text_streams.MOST_UNPACKED", 100)
    (tmp_path / name).write_bytes(data() if callable(data) else data)
    with pytest.raises(UsageError, match=rf"(?s)\A[^\n]*{name}[^\n]*\Z"):
        tokenize(tmp_path / name, tokenizer=bpe(tmp_path))
    (tmp_path / "other.txt").write_text("other")
    assert tokenize("other.txt") == 0, "without complete parts, flags may change"


def test_paths_that_cannot_be_meant(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "t.txt").write_text("text")
    for out in ("out", "locked"):
        (tmp_path / out).mkdir()
    (tmp_path / "out" / "mine").write_text("")
    assert len(input_files([], "out")) == len(library_files())
    lock = RunLock.take(tmp_path / "locked")
    for flags, out, named in (
        (["none.txt"], "out", "TEXT none.txt"), (["in"], "in/out", "--out in/out"), (["in"], "out", "'mine'"),
        (["in", "--part-mb", "0"], "out", "--part-mb 0"), (["in"], "locked", "--out locked"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=named):
            tokenize(*flags, out=out)
    lock.release()


@pytest.fixture
def long(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(lines([f"{number} " * 20 for number in range(60)]))
    return path


@pytest.fixture
def whole(long, tmp_path):
    assert tokenize(long, *SMALL, out="whole") == 0
    return files(tmp_path / "whole")


def stopped(long, monkeypatch, parts):
    """Run until a signal comes after `parts` complete parts; return the exit status."""
    real, left = encode_parts.PartWriter.finish, [parts]

    def finish(self, facts):
        real(self, facts)
        left[0] -= 1
        if not left[0]:
            signals.name = "SIGTERM"

    with monkeypatch.context() as patch:
        patch.setattr(encode_parts.PartWriter, "finish", finish)
        status = tokenize(long, *SMALL)
    signals.name = ""
    return status


def test_a_job_that_was_stopped_goes_on_with_what_is_missing(long, whole, tmp_path, monkeypatch, capsys):
    """Parts that do not match their record are written again; leftovers of a killed job are replaced."""
    count, out = sum(name.endswith(".bin") for name in whole), tmp_path / "out"
    assert stopped(long, monkeypatch, 4) == 75
    assert f"4 of {count} parts" in capsys.readouterr().out
    assert not (out / "manifest.json").exists()
    before = (out / "00003.bin").stat().st_ino
    for leftover in (".tokenize/00004.bin", ".tokenize/.00004.json.partial", "00004.idx", "00000.bin"):
        (out / leftover).write_bytes(b"half")
    (out / ".tokenize" / "00001.json").write_bytes(b'{"files": 7}')
    (out / "00002.idx").unlink()
    for leftover in (".tokenize/plan.json", "00077.bin", "00077.idx", "tokenizer.gguf"):
        (tmp_path / "new" / leftover).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / leftover).write_bytes(b"half")  # written by a job that completed no part
    assert tokenize(long, *SMALL, out="new") == 0
    assert files(tmp_path / "new") == whole
    capsys.readouterr()
    assert tokenize(long, *SMALL) == 0
    assert f"{count - 1} parts to write of {count}" in capsys.readouterr().out
    assert files(out) == whole
    assert before == (out / "00003.bin").stat().st_ino, "a complete part stays"


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_folder_that_was_begun_with_others_is_refused(is_complete, long, tmp_path, monkeypatch):
    assert stopped(long, monkeypatch, 99 if is_complete else 2) == (0 if is_complete else 75)
    raw, other = long.read_bytes(), tmp_path / "other.jsonl"
    other.write_bytes(lines(["other"]))

    def refused(problem, *arguments, **options):
        with pytest.raises(UsageError, match=rf"--out out .*{problem}"):
            tokenize(*arguments, **options)

    refused("field was 'text', is now 'body'", long, *SMALL, "--field", "body")
    refused("part-mb was 0.001, is now 0.002", long, "--part-mb", "0.002")
    refused("control-tokens was None, is now 'parse'", long, *SMALL, "--control-tokens", "parse")
    refused("kind was 'byte', is now 'gpt2'", long, *SMALL, tokenizer=bpe(tmp_path))
    refused("inputs was 1, is now 2", long, other, *SMALL)
    refused("'other.jsonl' was 'long.jsonl', is now 'other.jsonl'", other, *SMALL)
    long.write_bytes(raw + b"\n")
    refused(f"'long.jsonl' was {len(raw)}, is now {len(raw) + 1}", long, *SMALL)
    long.write_bytes(raw.replace(b"59", b"58"))
    refused("sha256 of the input 'long.jsonl'", long, *SMALL)
    long.write_bytes(raw)
    os.utime(long, (1, 1))  # only the modification time changes
    assert tokenize(long, *SMALL) == 0


def test_an_input_that_changes_under_the_work_ends_it(long, monkeypatch):
    real = encode_parts.PartWriter.add

    def add(self, name, ids):
        real(self, name, ids)
        long.write_bytes(lines(["other"]))

    monkeypatch.setattr(encode_parts.PartWriter, "add", add)
    with pytest.raises(JobError, match=r"long.jsonl"):
        tokenize(long)


def test_a_full_disk_and_records_that_are_gone_are_one_line(long, whole, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, fault in (
        ("encode_parts.PartWriter.finish", full), ("work_folder.os.fsync", full),
        ("command.read_record", lambda out, name: None),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(f"zero_mpi.commands.tokenize.{name}", fault)
            with pytest.raises(JobError, match="out" if name == "command.read_record" else "No space left"):
                tokenize(long, *SMALL)
    assert tokenize(long, *SMALL) == 0
    assert files(tmp_path / "out") == whole
