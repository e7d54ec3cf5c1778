"""The folder that is written: what it was begun with, what of it is complete, and its manifest.

`.tokenize` is there until all is complete: the plan, which says what the folder was begun with, the records
of parts, and what is not yet a part. A job that finds a plan goes on with it, if it was started with the
same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from zero_mpi.checkpoint.folders import sync_folder
from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.data.encoded_cache import code
from zero_mpi.data.text_files import MANIFEST, TOKENIZER
from zero_mpi.data.token_folder import UNFINISHED
from zero_mpi.data.tokenizers.byte import Tokenizer
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.atomic import write_whole
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.open import exists, is_folder, read_file
from zero_mpi.files.parse import parse_json
from zero_mpi.tokenize.part_files import read_record, sealed
from zero_mpi.tokenize.survey import Looked
from zero_mpi.tokenize.text_formats import InputFile

PLAN = "plan.json"
CODE = "zero_mpi's source"
MOST_BYTES, MOST_VALUES = 1 << 32, 1 << 30  # of a plan or manifest: one of millions of files is large
UNDER_WAY = re.compile(r"\d{5,}\.(bin|idx)|\.(\d{5,}|plan|manifest|tokenizer)\.(json|gguf)\.partial")
RECORD = re.compile(r"(\d{5,}|plan)\.json")
SAME = "start with the same to go on, or use another --out"

Table = dict[str, Any]


class WorkFolder:
    """The folder of `--out`, for rank 0 while the job has it; `about`: all but the inputs that decides bytes.

    Raises UsageError for a folder of other things, or one that was begun with others.
    """

    def __init__(self, out: Path, about: Mapping[str, Any]) -> None:
        self.out, self.aside, self._about = out, out / UNFINISHED, dict(about)
        if self.aside.is_symlink():
            raise UsageError(f"--out {shown(self.aside)}: expected a folder, found a link: remove it")
        self._manifest = read_table(out / MANIFEST)
        self._plan = None if self.is_complete else self._plan_kept()
        self._check_flags()

    @property
    def is_complete(self) -> bool:
        """Whether a job has finished here."""
        return self._manifest is not None

    def _plan_kept(self) -> Table | None:
        """The plan of the job before; None where that has completed nothing, which binds to nothing."""
        has_parts = is_folder(self.aside) and any(path.name != PLAN for path in self.aside.glob("*.json"))
        return read_table(self.aside / PLAN, believed=True) if has_parts else None

    def _check_flags(self) -> None:
        others = [path.name for path in self.out.iterdir() if not path.name.startswith(".")]
        if self._manifest is not None:
            self._refuse_difference({name: self._manifest.get(name) for name in self._about}, self._about)
        elif self._plan is not None:
            self._refuse_difference(self._plan["about"], {**self._about, CODE: code()})
        elif others and not exists(self.aside):
            raise UsageError(
                f"--out {shown(self.out)}: expected an empty folder, or one that tokenize has begun, found "
                f"{show(min(others))} there: use another --out"
            )

    def known(self, files: Sequence[InputFile]) -> dict[int, Looked]:
        """What need not be looked at again: files with the size and time of the plan. Raises UsageError."""
        if self._plan is None:
            return {}
        before = self._plan["looked"]
        self._refuse_other_files(before, [{"name": each.name, "bytes": each.size} for each in files])
        return {
            number: Looked(each["sha256"], tuple(each["weights"]))
            for number, (each, file) in enumerate(zip(before, files, strict=True))
            if each["changed_at"] == file.changed_at
        }

    def begin(self, looked: list[Table], inputs: list[Table], tokenizer: Tokenizer) -> None:
        """Write the plan; where there is one, or a manifest, see that it is of the same files.

        Raises UsageError, or OSError with a file's name.
        """
        if self._manifest is not None:
            with ours(self.out / MANIFEST):
                self._refuse_other_files(self._manifest.get("inputs"), inputs)
            self.clear()
            return
        if self._plan is not None:
            same = ("name", "bytes", "sha256")
            self._refuse_other_files(
                self._plan["looked"], [{name: each[name] for name in same} for each in looked]
            )
        self.aside.mkdir(exist_ok=True)
        self._remove_leftovers()
        header, _, _ = pack_file("zero_mpi", tokenizer.metadata(), [])
        write_whole(self.out / TOKENIZER, header)
        plan = {"about": {**self._about, CODE: code()}, "looked": looked}
        write_whole(self.aside / PLAN, json.dumps(sealed(plan)))

    def record(self, name: str) -> Table | None:
        """What is known of a part; None of one that is not complete."""
        return read_record(self.out, name)

    def end(self, manifest: Table) -> None:
        """Write the manifest, and remove what is no part of a complete folder. OSError with a file's name."""
        sync_folder(self.out)
        write_whole(self.out / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        sync_folder(self.out)
        self.clear()

    def clear(self) -> None:
        """Remove what is of no use to a folder that is complete; files of others stay where they are."""
        with suppress(OSError):
            for path in self.aside.iterdir():
                if UNDER_WAY.fullmatch(path.name) or RECORD.fullmatch(path.name):
                    path.unlink()
            self.aside.rmdir()

    def drop(self) -> None:
        """Remove all that was written, where it is of no use."""
        self.clear()
        (self.out / TOKENIZER).unlink()

    def _remove_leftovers(self) -> None:
        """Remove what a job left that was killed: files on their way to a name, or to a record."""
        for path in (*self.aside.iterdir(), *self.out.iterdir()):
            if UNDER_WAY.fullmatch(path.name) and self.record(path.stem) is None:
                path.unlink()

    def _refuse_difference(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raise UsageError for the first flag that is another one now.

        Parts that are complete had no line in error, so `skip_bad` may come later.
        """
        for name, value in now.items():
            was = before.get(name)
            if isinstance(value, dict) and isinstance(was, dict):
                self._refuse_difference(was, value)
            elif was != value and (name, was, value) != ("skip_bad", False, True):
                self._refuse(name.replace("_", "-"), was, value)

    def _refuse_other_files(self, before: Any, now: Sequence[Table]) -> None:
        """Raise UsageError for the first input that is another one now, as far as is told of each."""
        if not isinstance(before, list) or len(before) != len(now):
            self._refuse("the number of inputs", len(before or ()), len(now))
        for was, found in zip(before, now, strict=True):
            for name, value in found.items():
                if was.get(name) != value:
                    self._refuse(f"{name} of the input {show(found['name'])}", was.get(name), value)

    def _refuse(self, what: str, before: Any, now: Any) -> NoReturn:
        raise UsageError(
            f"--out {shown(self.out)} was begun with other input: {what} was {quoted(before)}, is now "
            f"{quoted(now)}: {SAME}"
        )


def read_table(path: Path, believed: bool = False) -> Table | None:
    """A table that tokenize wrote, `believed` if it has its digest; None without a file. FileError."""
    if not exists(path):
        return None
    with ours(path):
        found = parse_json(read_file(path, MOST_BYTES), most_values=MOST_VALUES)
        if not isinstance(found, dict) or (believed and sealed(found) != found):
            raise ValueError(shown(found, 60))
    return found


@contextmanager
def ours(path: Path) -> Iterator[None]:
    """Let what is wrong with a file that tokenize wrote be a FileError that says so."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{shown(path)}: expected what tokenize wrote, found {shown(error)}: remove the folder and "
            "start again"
        ) from None
