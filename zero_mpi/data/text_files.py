"""Files of a corpus, from --data or Python's own library; each file's kind is recognised by its first bytes.

Each kind of file that is not text has a name and a remedy. Bytes that may also begin a text ("GGUF") only
identify a kind if the file contains bytes that no text has. Text in another encoding, such as Latin-1 or
Shift JIS, is read with a note. UTF-16 and UTF-32 are refused, because they contain zero bytes.
"""

import codecs
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from zero_mpi.errors import FileError, UsageError, prefixed
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import exists, is_file, is_folder

NANOGPT = "nanogpt:"  # prefix of a path to ids without a header, which cannot be recognised by content
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.gguf"  # files in a folder that `zero-mpi tokenize` wrote
NOTES = frozenset({"dataset_info.json", "state.json", "dataset_dict.json"})  # files of the package datasets
# Some distributions do not ship all of these folders, and tests and caches are of little use as text.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def stdlib_root() -> Path:
    """Return the folder of Python's own library in the base installation, even in a virtual environment."""
    return Path(sysconfig.get_paths()["stdlib"])


def named(paths: Sequence[str], limit: int = 40) -> str:
    """Return a description of `--data`: its first path in `limit` characters, and how many paths follow."""
    if not paths:
        return f"Python's standard library in {stdlib_root()}"
    return shown(paths[0], limit) + (f" and {len(paths) - 1} more" * (len(paths) > 1))


def library_files() -> list[tuple[str, Path]]:
    """Return (name, path) of Python's own .py sources, sorted by name.

    Tests and installed packages are left out.
    """
    # The build writes _sysconfigdata*, so its content differs between machines.
    names = [name for name in _walk(stdlib_root(), _NOT_LIBRARY) if not name.startswith("_sysconfigdata")]
    return [(name, stdlib_root() / name) for name in names if name.endswith(".py")]


def collect_files(paths: Sequence[str], flag: str = "--data") -> list[tuple[str, Path]]:
    """Return (name, path) of every file under `paths`: given files, and the files of folders, in name order.

    The name is relative to the given folder, with forward slashes. For a file given directly it is the last
    part of the path, after `NANOGPT` if the path begins with that. Hidden files and folders inside a folder
    are skipped. Links are followed. A repeated file is used once, so its text is not both trained on and held
    out. Files that the package datasets adds to its data are left out. Raises UsageError, which names the
    `flag`, for a missing path.
    """
    by_path: dict[str, tuple[str, Path]] = {}
    for argument in paths:
        mark = NANOGPT if argument.startswith(NANOGPT) else ""
        source = Path(argument.removeprefix(mark))
        with prefixed(flag):
            if is_folder(source):
                files = [(name, source / name) for name in _walk(source)]
            elif is_file(source):
                files = [(source.name, source)]
            else:
                problem = "is neither a file nor a folder" if exists(source) else "does not exist"
                no_shares = flag == "--val-data" and "=" in argument
                raise UsageError(f"{flag} {shown(source)} {problem}" + " (shares: --data only)" * no_shares)
        for name, path in files:
            by_path.setdefault(os.path.realpath(path), (mark + name, path))
    is_dataset = any(path.suffix == ".arrow" for _, path in by_path.values())
    return [file for file in by_path.values() if not (is_dataset and file[1].name in NOTES)]


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[str]:
    """Return sorted names of regular files under `root`. A loop of links is followed only once.

    Raises FileError for a link to a missing file, unless `skip` is given, as for Python's library.
    """
    names, seen = list[str](), set[str]()
    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(n for n in folders if n not in skip and n[0] != ".")
        for path in (Path(folder, n) for n in files if n[0] != "."):
            if is_file(path):
                names.append(path.relative_to(root).as_posix())
            elif path.is_symlink() and not exists(path) and not skip:
                raise FileError(f"{shown(path)} links to a missing file: restore it, or remove the link")
    return sorted(names)


def unreadable(error: OSError) -> NoReturn:
    raise UsageError(f"cannot read {shown(error.filename)}: {error.strerror}") from error


BLOCK = 1 << 20
HEAD = 8192  # bytes that decide whether a file is text, as in git and grep
LINES = (".jsonl", ".ndjson")  # suffixes of JSON Lines


class Kind(NamedTuple):
    """Kind of a file that is not text, with its remedy. Files of this kind begin with `data`."""

    name: str
    remedy: str
    data: bytes = b""


TOKENIZE = "convert it to token files with zero-mpi tokenize"
TABLES = "conversations need a column such as messages, and pyarrow: pip install 'zero-mpi[arrow]'"
MODEL = "use --init for a model"
ICONV = "convert it first: iconv -f {} -t UTF-8 FILE > NEW.txt"
BEGINNINGS = (
    Kind("a Parquet file", f"{TOKENIZE} (as .parquet); {TABLES}", b"PAR1"),
    Kind("an Arrow file", f"extract its texts first, for example with pyarrow; {TABLES}", b"ARROW1\0"),
    Kind("an Arrow stream", f"extract its texts first; {TABLES}", b"\xff\xff\xff\xff\x10"),
    Kind("gzip", f"unpack it first: gunzip -k FILE; or {TOKENIZE} (as .gz)", b"\x1f\x8b"),
    Kind("zstd", f"unpack it first: zstd -d FILE; or {TOKENIZE} (as .zst)", b"\x28\xb5\x2f\xfd"),
    Kind("a zip archive", "unpack it first: unzip FILE", b"PK\x03\x04"),
    Kind("a GGUF model", MODEL, b"GGUF"),
    Kind("a NumPy array", "rename a token file to .npy", b"\x93NUMPY"),
    Kind("a PDF document", "convert it to text first: pdftotext FILE", b"%PDF-"),
    Kind("a pointer of Git LFS", "fetch it first: git lfs pull", b"version https://git-lfs.github.com/"),
    # Longer signatures come first, because UTF-32 begins like UTF-16.
    Kind("text in UTF-32", ICONV.format("UTF-32"), codecs.BOM_UTF32_LE),
    Kind("text in UTF-32", ICONV.format("UTF-32"), codecs.BOM_UTF32_BE),
    Kind("text in UTF-16", ICONV.format("UTF-16"), codecs.BOM_UTF16_LE),
    Kind("text in UTF-16", ICONV.format("UTF-16"), codecs.BOM_UTF16_BE),
)
LINES_REMEDY = (
    f"{TOKENIZE} (as .jsonl), or extract the text field, e.g. jq -r .text FILE > NEW.txt; a .jsonl of "
    "conversations has messages, prompt and completion, instruction and output, or conversations in each "
    "line"
)
# Matches the beginning of an array of objects, or of an object that holds conversations.
ARRAY = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\{\s*"(?:data|messages|conversations)"\s*:\s*)?\[\s*\{')
ROWS_REMEDY = "write it as JSON Lines, one object per line: jq -c '.[]' FILE > NEW.jsonl, or '.NAME[]'"
BINARY = Kind(
    "binary data",
    "expected text in UTF-8, or token ids as a 1-D .npy of uint16 or uint32, or as nanogpt:FILE if they are "
    "uint16 without a header",
)
CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\v\f\r\x1a\x1b\b") | {0x7F}


def kind_of(head: bytes, name: str) -> Kind | None:
    """Return the kind of a file, recognised by its first `HEAD` bytes and its name; None for text."""
    is_wrong = not _is_utf8(head, whole=False)
    for kind in BEGINNINGS:
        is_long = len(kind.data) > 4
        if head.startswith(kind.data) and (is_long or is_wrong or b"\0" in head):
            return kind
    if 2 <= int.from_bytes(head[:8], "little") < 1 << 28 and head[8:9] == b"{":  # a JSON header's length
        return Kind("a safetensors model", MODEL)
    if b"\0" in head or (is_wrong and sum(byte in CONTROLS for byte in head) > 0.05 * len(head)):
        return BINARY
    if _has_objects(head, name):
        return Kind("JSON Lines", LINES_REMEDY)
    if name.lower().endswith(".json") and ARRAY.match(head):
        return Kind("an array of JSON objects", ROWS_REMEDY)
    return None


def _has_objects(head: bytes, name: str) -> bool:
    """Return whether the first lines are JSON objects or, in a file with a suffix of JSON Lines, any values.

    A model would learn the JSON syntax with the text.
    """
    by_name = name.lower().endswith(LINES)
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not head.startswith((b"{", b"[", b'"') if by_name else b"{"):
        return False
    lines = [line for line in head.split(b"\n")[:-1] if line.strip()][:2]
    if len(lines) < 2 - by_name:
        return by_name
    try:
        return all(isinstance(json.loads(line), (dict, list, str) if by_name else dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _is_utf8(data: bytes, whole: bool = True) -> bool:
    """Return whether bytes are UTF-8, checked in blocks. Unless `whole`, the last character may be cut."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, 0 if data.isascii() else len(data), BLOCK):
            decoder.decode(data[start : start + BLOCK], whole and start + BLOCK >= len(data))
    except UnicodeDecodeError:
        return False
    return True


class TextFilter:
    """Filter that decides which files are read, and collects names of files for `notes`.

    paths       files and folders given by the user
    any_bytes   whether the given files are read unchanged, even if they are not text
    flag        flag that gave the paths
    """

    def __init__(self, paths: Sequence[str], any_bytes: bool, flag: str = "--data") -> None:
        self._flag = flag
        self._named_paths, self._any_bytes = {os.path.realpath(path) for path in paths}, any_bytes
        self.skipped, self.raw, self.not_utf8 = list[str](), list[str](), list[str]()

    def takes(self, name: str, path: Path, head: bytes) -> bool:
        """Return whether to read a file, by its first bytes. Raise UsageError if a named file is not text."""
        kind = kind_of(head, name) if self._named_paths else BINARY if b"\0" in head else None
        if kind is None:
            return True
        note = f"{shown(name, 60)}: {kind.name}"
        if os.path.realpath(path) not in self._named_paths:
            self.skipped.append(note)
            return False
        if not self._any_bytes:
            raise UsageError(
                f"{self._flag} {shown(path)} looks like {kind.name}, not text: {kind.remedy} (or train on "
                "its raw bytes with --tokenizer byte)"
            )
        self.raw.append(note)
        return True

    def read(self, name: str, data: bytes) -> None:
        """Record a file that is not UTF-8, for `notes`. `data`: its full content."""
        if self._named_paths and not self._any_bytes and not _is_utf8(data):
            self.not_utf8.append(shown(name, 60))

    def notes(self) -> Iterator[str]:
        """Yield a line for each list of files that is not empty: the number of files, and some names."""
        for names, text in (
            (self.skipped, "skipped files that are not text: {}"),
            (self.raw, "files that are not text, read as raw bytes (--tokenizer byte): {}"),
            (self.not_utf8, "text that is not UTF-8: {}; convert it with iconv -f ENCODING -t UTF-8"),
        ):
            if names:
                dots = ", ..." if len(names) > 3 else ""
                yield text.format(f"{len(names):,} ({', '.join(names[:3])}{dots})")
