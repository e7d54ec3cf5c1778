"""A folder of token files, with its plan, the records of complete parts, and the manifest.

The folder `.tokenize` exists until all parts are complete. It contains the plan (the first job's
settings), a record of each complete part, and unfinished files. When a pair of token files is on disk, it is
renamed, and then its record is written. So a part with a record is complete even if the writer is killed. A
part without a record is written again, with the same bytes.
"""

import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zero_mpi.checkpoint.folders import sync_folder
from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.data.corpus import UNFINISHED
from zero_mpi.data.encoded_cache import code, sealed
from zero_mpi.data.text_files import MANIFEST, TOKENIZER
from zero_mpi.data.token_formats import MEGATRON_MOST, megatron_index
from zero_mpi.data.tokenizers.byte import Tokenizer
from zero_mpi.errors import FileError, UsageError, naming
from zero_mpi.files.atomic import write_to_disk, write_whole
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.open import exists, open_in_place, read_file
from zero_mpi.files.parse import parse_json

PLAN, BIN, IDX = "plan.json", ".bin", ".idx"
CODE = "zero_mpi's source"  # key in the plan: digest of the code
MOST_BYTES, MOST_VALUES = 1 << 32, 1 << 30  # limits of a plan or manifest, which may list millions of files
UNDER_WAY = re.compile(r"\d{5,}\.(bin|idx)|\.(\d{5,}|plan|manifest|tokenizer)\.(json|gguf)\.partial")
RECORD = re.compile(r"(\d{5,}|plan)\.json")
SAME = "use the same value to continue, or another --out"

Table = dict[str, Any]


class WorkFolder:
    """Folder of `--out`, which rank 0 has locked. `settings` affect the bytes and lack the inputs.

    Raises UsageError if the folder has other files, or was started with other settings.
    """

    def __init__(self, out: Path, settings: Table) -> None:
        self.out, self.job_folder, self.settings = out, out / UNFINISHED, settings
        if self.job_folder.is_symlink():
            raise UsageError(f"--out {shown(self.job_folder)}: expected a folder, found a link: remove it")
        self.is_complete = exists(out / MANIFEST)
        self._plan = out / MANIFEST if self.is_complete else self.job_folder / PLAN
        self._earlier = self._earlier_table()
        self._check(settings if self.is_complete else {**settings, CODE: code()})
        others = [path.name for path in out.iterdir() if not path.name.startswith(".")]
        if others and not self.is_complete and not exists(self.job_folder):
            raise UsageError(
                f"--out {shown(out)}: expected an empty folder or one that tokenize started, found "
                f"{show(min(others))}: use another --out"
            )

    def _earlier_table(self) -> Table:
        """Return the manifest, or the plan of a job that has complete parts; {} without either."""
        if self.is_complete:
            return read_table(self._plan)
        if exists(self._plan) and any(path.name != PLAN for path in self.job_folder.glob("*.json")):
            return read_table(self._plan, sealed_too=True)
        return {}

    def _check(self, now: Table) -> None:
        if self._earlier:
            with as_file_errors(self._plan):
                for name, old, value in differences(self._earlier, now):
                    problem = f"--out {shown(self.out)} was started with other input"
                    raise UsageError(f"{problem}: {name} was {quoted(old)}, is now {quoted(value)}: {SAME}")

    def begin(self, inputs: list[Table], tokenizer: Tokenizer) -> None:
        """Write plan and tokenizer. Raise UsageError if the inputs have changed, OSError if writing fails."""
        self._check({"inputs": inputs})
        self.settings["inputs"] = inputs
        if self.is_complete:
            self.clear()
            return
        self.job_folder.mkdir(exist_ok=True)
        for path in (*self.job_folder.iterdir(), *self.out.iterdir()):  # files that a killed job left
            if UNDER_WAY.fullmatch(path.name) and read_record(self.out, path.stem) is None:
                path.unlink()
        header, _, _ = pack_file("zero_mpi", tokenizer.metadata(), [])
        write_whole(self.out / TOKENIZER, header)
        write_whole(self._plan, json.dumps(sealed({**self.settings, CODE: code()})))

    def end(self, manifest: Table) -> None:
        """Write the manifest and remove the files of the job. Raise OSError if writing fails."""
        sync_folder(self.out)
        write_whole(self.out / MANIFEST, json.dumps({**self.settings, **manifest}, indent=2) + "\n")
        sync_folder(self.out)
        self.clear()

    def clear(self) -> None:
        """Remove plan, records and unfinished files, but keep files of other programs."""
        with suppress(OSError):
            for path in self.job_folder.iterdir():
                if UNDER_WAY.fullmatch(path.name) or RECORD.fullmatch(path.name):
                    path.unlink()
            self.job_folder.rmdir()


class PartWriter:
    """Writer of a pair of token files called `name` in a folder, with ids of type `dtype`.

    If it is closed before `finish`, it leaves no files. All methods raise OSError with the file's name.
    """

    def __init__(self, out: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._out, self._name, self._dtype = out, name, dtype
        self._sizes, self._digest = array("i"), hashlib.sha256()
        self._paths = {suffix: out / UNFINISHED / f"{name}{suffix}" for suffix in (BIN, IDX)}
        self._file = open(self._paths[BIN], "wb", opener=open_in_place)  # noqa: SIM115 (closed by __exit__)

    def add(self, name: str, ids: NDArray[np.integer[Any]]) -> None:
        """Append a document, called `name` in errors, unless it is empty."""
        if len(ids) > MEGATRON_MOST:
            raise UsageError(f"{name}: a document has {len(ids):,} tokens, but at most {MEGATRON_MOST:,} fit")
        if len(ids):
            raw = ids.astype(self._dtype, copy=False).tobytes()
            with naming(self._paths[BIN]):
                self._file.write(raw)
            self._digest.update(raw)
            self._sizes.append(len(ids))

    def finish(self, facts: Table) -> None:
        """Rename the pair of files to its final names, then write its record with these `facts`."""
        with naming(self._paths[BIN]):
            self._file.flush()
            os.fsync(self._file.fileno())
        sizes = np.frombuffer(self._sizes, np.int32)
        index, tokens = megatron_index(sizes, self._dtype), int(sizes.sum(dtype=np.int64))
        stats = {BIN: (tokens * self._dtype.itemsize, self._digest), IDX: (len(index), hashlib.sha256(index))}
        files = [
            {"name": self._name + suffix, "bytes": size, "sha256": digest.hexdigest()}
            for suffix, (size, digest) in stats.items()
        ]
        if len(sizes):
            with naming(self._paths[IDX]):
                write_to_disk(self._paths[IDX], index)
            for suffix, path in self._paths.items():
                os.replace(path, self._out / f"{self._name}{suffix}")
            sync_folder(self._out)
        record = {"documents": len(sizes), "tokens": tokens, "files": files if len(sizes) else [], **facts}
        write_whole(self._out / UNFINISHED / f"{self._name}.json", json.dumps(sealed(record)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # `finish` has flushed the data
            self._file.close()
        for path in self._paths.values():
            with suppress(OSError):
                os.unlink(path)


def read_record(out: Path, name: str) -> Table | None:
    """Return the record of a part, or None if the part is not complete."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        record: Table = parse_json(read_file(out / UNFINISHED / f"{name}.json"))
        is_complete = all((out / file["name"]).stat().st_size == file["bytes"] for file in record["files"])
        return record if is_complete and sealed(record) == record else None
    return None


def read_table(path: Path, sealed_too: bool = False) -> Table:
    """Return a table that tokenize wrote. Raise FileError if it, or its seal if `sealed_too`, is invalid."""
    with as_file_errors(path):
        table = parse_json(read_file(path, MOST_BYTES), most_values=MOST_VALUES)
        if not isinstance(table, dict) or not table or (sealed_too and sealed(table) != table):
            raise ValueError(shown(table, 60))
    return table


def differences(before: Any, now: Any, label: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value before, value now) for each value that differs.

    Complete parts have no invalid lines, so `skip_bad` may change from False to True.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        suffix = f" of the input {show(now['name'])}" if label == "inputs" else ""
        for name, value in now.items():
            yield from differences(before.get(name), value, name.replace("_", "-") + suffix)
    elif isinstance(now, list) and (not isinstance(before, list) or len(before) != len(now)):
        yield f"the number of {label}", len(before or ()), len(now)
    elif isinstance(now, list):
        for old, value in zip(before, now, strict=True):
            yield from differences(old, value, label)
    elif before != now and (label, before, now) != ("skip-bad", False, True):
        yield label, before, now


@contextmanager
def as_file_errors(path: Path) -> Iterator[None]:
    """Convert errors that an invalid file of tokenize causes in the `with` block to FileError."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"expected a file of tokenize, found {shown(error)}: remove the folder and start again"
        raise FileError(f"{shown(path)}: {problem}") from None
