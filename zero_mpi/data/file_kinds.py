"""What a file is that is no text, by its first bytes: a name for it, and what makes text of it.

The beginnings are those that formats are known by. One that a text may have too ("BM", "GGUF") counts only
with bytes that no text has. Text that is not in UTF-8 is text: in Latin-1 or Shift JIS, say, byte by byte.
UTF-16 and UTF-32 are not, for most of their bytes are zero.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import NamedTuple

BLOCK = 1 << 20
HEAD = 8192  # bytes looked at to tell text from binary, as git and grep do
LINES = (".jsonl", ".ndjson")
UNPACK = "unpack it first"
TOKENIZE = "zero-mpi tokenize makes token files of it"
EXTRACT = "extract its texts first, say with pyarrow or the datasets package, into files in UTF-8"


class Kind(NamedTuple):
    """What a file looks like, and what to do about it."""

    name: str
    remedy: str


class Beginning(NamedTuple):
    """Bytes at a place of the head that mean a kind."""

    data: bytes
    name: str
    remedy: str
    at: int = 0


TABLES = "conversations in it take a column such as messages, and pip install 'zero-mpi[arrow]'"
MODEL = "a model is named by --init"
BEGINNINGS = (
    Beginning(b"PAR1", "a Parquet file", f"{TOKENIZE} (named .parquet); {TABLES}"),
    Beginning(b"ARROW1\0", "an Arrow file", f"{EXTRACT}; {TABLES}"),
    Beginning(b"\xff\xff\xff\xff\x10", "an Arrow stream", f"{EXTRACT}; {TABLES}"),
    Beginning(b"\x89HDF\r\n\x1a\n", "an HDF5 file", EXTRACT),
    Beginning(b"ORC", "an ORC file", EXTRACT),
    Beginning(b"Obj\x01", "an Avro file", EXTRACT),
    Beginning(b"SQLite format 3\0", "an SQLite database", EXTRACT),
    Beginning(b"\x1f\x8b", "gzip", f"unpack it first: gunzip -k FILE; or {TOKENIZE} (named .gz)"),
    Beginning(b"\x28\xb5\x2f\xfd", "zstd", f"unpack it first: zstd -d FILE; or {TOKENIZE} (named .zst)"),
    Beginning(b"\xfd7zXZ\0", "xz", "unpack it first: unxz -k FILE"),
    Beginning(b"BZh", "bzip2", "unpack it first: bunzip2 -k FILE"),
    Beginning(b"\x04\x22\x4d\x18", "lz4", "unpack it first: lz4 -d FILE"),
    Beginning(b"\xff\x06\0\0sNaPpY", "Snappy", UNPACK),
    Beginning(b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    Beginning(b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    Beginning(b"ustar", "a tar archive", "unpack it first: tar -xf FILE", 257),
    Beginning(b"GGUF", "a GGUF model", MODEL),
    Beginning(b"\x93NUMPY", "a NumPy array", "token files are named .npy"),
    Beginning(b"\x7fELF", "a program", "name text"),
    Beginning(b"MZ", "a program for Windows", "name text"),
    Beginning(b"\xca\xfe\xba\xbe", "a compiled program", "name text"),
    Beginning(b"\xcf\xfa\xed\xfe", "a compiled program", "name text"),
    Beginning(b"\0asm", "a compiled program", "name text"),
    Beginning(b"\x89PNG\r\n\x1a\n", "a PNG image", "name text"),
    Beginning(b"\xff\xd8\xff", "a JPEG image", "name text"),
    Beginning(b"GIF8", "a GIF image", "name text"),
    Beginning(b"BM", "a BMP image", "name text"),
    Beginning(b"II*\0", "a TIFF image", "name text"),
    Beginning(b"MM\0*", "a TIFF image", "name text"),
    Beginning(b"RIFF", "an image, a sound or a film", "name text"),
    Beginning(b"OggS", "a sound", "name text"),
    Beginning(b"ID3", "a sound", "name text"),
    Beginning(b"ftyp", "a film", "name text", 4),
    Beginning(b"%PDF-", "a PDF document", "make text of it first: pdftotext FILE"),
    Beginning(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", "save it as plain text first"),
    Beginning(b"version https://git-lfs.github.com/", "a pointer of Git LFS", "fetch it first: git lfs pull"),
)
# What a zip archive holds tells what it is.
ZIPPED = (
    (b".npy", Kind("NumPy arrays (.npz)", "save the ids as a 1-D .npy of uint16 or uint32")),
    (b"data.pkl", Kind("a PyTorch file", "name text; --init takes models, as GGUF or safetensors")),
    (b"word/", Kind("a Word document", "save it as plain text first")),
    (b"mimetypeapplication/epub", Kind("an EPUB book", "make text of it first: pandoc -t plain FILE")),
    (b"", Kind("a zip archive", "unpack it first: unzip FILE")),
)
WIDE = (  # the longer ones first: UTF-32 begins as UTF-16 does
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
PICKLED = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
LINES_REMEDY = (
    f"{TOKENIZE} (named .jsonl); or write out the field that is the text, say: jq -r .text FILE > NEW.txt; "
    "a .jsonl of conversations has messages, prompt and completion, instruction and output, or conversations "
    "in each line"
)
# The beginning of an array of objects, or of an object with one of conversations.
ARRAY = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\{\s*"(?:data|messages|conversations)"\s*:\s*)?\[\s*\{')
ROWS_REMEDY = "write it as JSON Lines, an object in each line: jq -c '.[]' FILE > NEW.jsonl, or '.NAME[]'"
BINARY = Kind(
    "binary data",
    "expected text in UTF-8, or token ids as a 1-D .npy of uint16 or uint32, or as nanogpt:FILE if they are "
    "uint16 without a header",
)
CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\v\f\r\x1a\x1b\b") | {0x7F}


def kind_of(head: bytes, name: str) -> Kind | None:
    """What a file is, by its first `HEAD` bytes and its name; None for text."""
    return next((kind for look in LOOKS if (kind := look(head, name)) is not None), None)


def known(head: bytes, name: str) -> Kind | None:
    """By the bytes that its format begins with."""
    for begin in BEGINNINGS:
        surely = len(begin.data) > 4 and not begin.at
        if head[begin.at :].startswith(begin.data) and (surely or no_text(head)):
            return Kind(begin.name, begin.remedy)
    if head.startswith(b"PK\x03\x04"):
        return next(kind for part, kind in ZIPPED if part in head)
    return None


def wide(head: bytes, name: str) -> Kind | None:
    """Text in which a character has two or four bytes, by its mark, or by where its zeros are."""
    encoding = next((found for mark, found in WIDE if head.startswith(mark)), "") or unmarked(head)
    if not encoding:
        return None
    return Kind(f"text in {encoding}", f"convert it first: iconv -f {encoding} -t UTF-8 FILE > NEW.txt")


def unmarked(head: bytes) -> str:
    """The encoding of wide text without a mark: most letters are of one byte and zeros. Empty: none."""
    for width in (4, 2):
        whole = head[: len(head) // width * width]
        zeros = sorted(whole[place::width].count(0) * width / max(1, len(whole)) for place in range(width))
        if len(whole) >= 4 * width and zeros[0] < 0.05 and zeros[1] > 0.7:
            return f"UTF-{8 * width}{'LE' if whole[0] else 'BE'}"
    return ""


def model(head: bytes, name: str) -> Kind | None:
    """Weights: safetensors begins with the length of a JSON object, a pickle with its protocol."""
    if 2 <= int.from_bytes(head[:8], "little") < 1 << 28 and head[8:9] == b"{":
        return Kind("a safetensors model", MODEL)
    if head.startswith(PICKLED) and no_text(head):
        return Kind("a pickle of Python", "write its texts into files in UTF-8 first")
    return None


def binary(head: bytes, name: str) -> Kind | None:
    """Whatever has bytes that no text has."""
    return BINARY if b"\0" in head or (not is_utf8(head, whole=False) and controls(head) > 0.05) else None


def json_lines(head: bytes, name: str) -> Kind | None:
    """A JSON object in each line: markup and numbers would be learned beside the text."""
    if not head.startswith(b"{"):
        return None
    lines = head.split(b"\n")
    whole = [line for line in lines[:-1] if line.strip()][:2]
    by_name = name.lower().endswith(LINES)
    found = all(map(is_object, whole)) if len(whole) == 2 or (whole and by_name) else by_name
    return Kind("JSON Lines", LINES_REMEDY) if found else None


def json_rows(head: bytes, name: str) -> Kind | None:
    """An array of JSON objects by name and beginning: its markup would be learned beside the text."""
    is_one = name.lower().endswith(".json") and ARRAY.match(head) is not None
    return Kind("an array of JSON objects", ROWS_REMEDY) if is_one else None


LOOKS: tuple[Callable[[bytes, str], Kind | None], ...] = (known, wide, model, binary, json_lines, json_rows)


def no_text(head: bytes) -> bool:
    """Whether bytes are in the head that no text in UTF-8 has."""
    return b"\0" in head or not is_utf8(head, whole=False)


def is_utf8(data: bytes, whole: bool = True) -> bool:
    """Whether bytes are text in UTF-8; not `whole`: the last letter may be cut. It is read in blocks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, 0 if data.isascii() else len(data), BLOCK):
            decoder.decode(data[start : start + BLOCK], whole and start + BLOCK >= len(data))
    except UnicodeDecodeError:
        return False
    return True


def controls(head: bytes) -> float:
    """The share of bytes that are control letters in every encoding of text."""
    return sum(byte in CONTROLS for byte in head) / max(1, len(head))


def is_object(line: bytes) -> bool:
    """Whether a line is a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
