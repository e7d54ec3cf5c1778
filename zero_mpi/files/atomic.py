"""Atomic writes of small files: a new file next to the target is written, synced to disk and renamed.

If the writer is killed, the disk is full or the power fails, the file has the old or the new content, never
a part of the new content. Checkpoints do the same with a folder (`checkpoint.folders`).
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from zero_mpi.errors import naming
from zero_mpi.files.open import open_in_place, refusing


def write_whole(path: Path, content: str | bytes, suffix: str = "partial") -> None:
    """Replace a file's content; on failure raise OSError with its name and leave the file unchanged.

    `suffix` is appended to the name of the temporary file, `.NAME.partial`. Writers that may run at the same
    time need different suffixes.
    """
    with replacing(path, suffix) as partial:
        write_to_disk(partial, content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, suffix: str = "partial") -> Iterator[Path]:
    """Yield a temporary path to write to in several calls, then rename the file as `write_whole` does."""
    partial = partial_of(path, suffix)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None
        raise


def partial_of(path: Path, suffix: str = "partial") -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def write_output(path: Path, content: str, suffix: str = "partial") -> None:
    """Write a user's file as `write_whole` does; a device or pipe is not replaced. Raises OSError."""
    if is_device(path):
        write_to_device(path, content.encode())
    else:
        write_whole(path, content, suffix)


def write_json(flag: str, path: Path | str, results: object) -> None:
    """Write a command's results as JSON; raises FileError that names the flag."""
    with refusing(flag, path, "cannot be written"):
        write_output(Path(path), json.dumps(results, indent=2, allow_nan=False) + "\n")


def is_device(path: Path) -> bool:
    """Return whether a path is a device or pipe, or a system folder's link to one, such as /dev/stdout."""
    try:
        link, target = os.lstat(path), os.stat(path)
    except OSError:
        return False
    is_system = os.path.abspath(path).startswith(("/dev/", "/proc/"))
    return not (stat.S_ISREG(target.st_mode) or stat.S_ISDIR(target.st_mode)) and (
        is_system or not stat.S_ISLNK(link.st_mode)
    )


def write_to_device(path: Path, content: bytes) -> None:
    """Write to a device or pipe, which has no content to keep. Raises OSError, which may lack the path."""
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        write_all(handle, content)
    finally:
        os.close(handle)


def write_to_disk(path: Path, content: bytes) -> None:
    """Write a file from its beginning and sync it to disk. Raises OSError, which may lack the path."""
    handle = open_in_place(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, content: bytes) -> None:
    """Write all of `content`, because a single call may write only a part, for example on a full disk."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def append_whole(file: FileIO, line: bytes) -> None:
    """Append a line completely or not at all. Raises OSError with the file's name."""
    end = file.seek(0, os.SEEK_END)
    with naming(file.name):
        try:
            write_all(file.fileno(), line)
        except OSError:
            file.truncate(end)
            raise
