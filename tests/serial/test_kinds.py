"""The first bytes determine the kind of a file; every kind but plain text has a name and a remedy."""

import gzip
import io
import json
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from zero_mpi.data.text_files import BEGINNINGS, HEAD, kind_of

TEXT = "Some text, with an é and a 漢, over several lines.\n" * 40
RECORDS = [{"text": "one " * 9, "id": 1}, {"text": "two", "id": 2}, {"text": "three"}]
JSONL = "".join(json.dumps(record) + "\n" for record in RECORDS)


def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), content)
    return buffer.getvalue()


def saved(function, *arrays):
    buffer = io.BytesIO()
    function(buffer, *arrays)
    return buffer.getvalue()


DRAW = np.random.default_rng(0)
FOREIGN = {
    "gzip": (gzip.compress(TEXT.encode()), "gzip", "gunzip"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x58" + DRAW.bytes(50), "zstd", "zstd -d"),
    "npy of another name": (saved(np.save, np.arange(9)), "a NumPy array", ".npy"),
    "PyTorch": (zipped(archive__data_pkl=b"x"), "a zip archive", "unzip"),
    "Parquet": (b"PAR1\x15\x04\x15\x10" + DRAW.bytes(99) + b"PAR1", "a Parquet file", "zero-mpi tokenize"),
    "safetensors": (save({"a": np.zeros(3, np.float32)}), "a safetensors model", "--init"),
    "pickle": (pickle.dumps(RECORDS), "binary data", "UTF-8"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(20), "a GGUF model", "--init"),
    "PDF": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", "a PDF document", "pdftotext"),
    "program": (Path(sys.executable).read_bytes(), "binary data", "UTF-8"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS", "pull"),
    "UTF-16 LE": (TEXT.encode("utf-16"), "text in UTF-16", "iconv -f UTF-16 "),
    "UTF-16 without a mark": (TEXT.encode("utf-16-be"), "binary data", "UTF-8"),
    "JSON Lines": (JSONL.encode(), "JSON Lines", "jq -r .text"),
    "raw ids": (DRAW.integers(0, 50000, 999).astype(np.uint16).tobytes(), "binary data", "1-D .npy"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_text_has_a_name_and_a_remedy(name):
    data, expected, remedy = FOREIGN[name]
    kind = kind_of(data[:HEAD], "file")
    assert kind is not None
    assert kind.name.startswith(expected)
    assert remedy in kind.remedy


TEXTS = {
    "nothing": b"",
    "UTF-8": TEXT.encode(),
    "UTF-8, cut in a letter": TEXT.encode()[: TEXT.encode().index(b"\xa9")],
    "Latin-1": "Grüße, Füße, Öl und Äpfel\n".encode("latin-1") * 40,
    "Japanese": "吾輩は猫である。名前はまだ無い。\n".encode("shift_jis") * 40,
    "colours of a terminal": b"\x1b[31mred\x1b[0m\b\b\n" * 9,
    "an object": json.dumps(RECORDS[0], indent=1).encode(),
    "a list": json.dumps(RECORDS).encode(),
    "source code": Path(__file__).read_bytes(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_text(name):
    assert kind_of(TEXTS[name][:HEAD], "file") is None


@pytest.mark.parametrize("begin", [each for each in BEGINNINGS if each.data.isascii()], ids=str)
def test_a_text_may_begin_with_short_letters_of_a_format(begin):
    """Short ASCII signatures such as GGUF may begin a text; long ones such as %PDF- do not."""
    text = begin.data + b" is how a text begins.\n"
    if b"\0" not in begin.data and len(begin.data) < 5:
        assert kind_of(text, "file") is None
    else:
        assert kind_of(text, "file").name == begin.name


def test_lines_that_are_longer_than_what_is_looked_at_go_by_their_name():
    data = json.dumps({"text": "x" * 2 * HEAD}).encode()[:HEAD]
    assert kind_of(data, "a.jsonl").name == kind_of(data, "a.ndjson").name == "JSON Lines"
    assert kind_of(data, "a.json") is None
    for begin in (b"\xef\xbb\xbf", b"\n", b" ", b'["a"]\n', b'"a"\n'):
        assert kind_of(begin + JSONL.encode(), "a.jsonl").name == "JSON Lines"
    assert kind_of(b'"a", he said.\n"b"\n', "a.jsonl") is None
    for head in (
        b' [\n {"text": "a"}]',
        b'{"data": [{"messages": []}]}',
        b'{\n "messages":\n [{"role": "user"}]}',
    ):
        assert kind_of(head, "a.json").name == "an array of JSON objects"
    assert kind_of(b"[1, 2]", "a.json") is None
