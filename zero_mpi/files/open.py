"""Opens and reads files safely, even if another program has replaced them, for example by a pipe.

Only regular files are opened, because a pipe could block forever and a device never ends. Reads are bounded.
`open_in_place` opens files safely to overwrite, append to or truncate them.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import BinaryIO

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import shown

MOST_JSON = 64 << 20  # limit in bytes of a file that is read in full to be parsed
READ_AT_ONCE = 1 << 20  # bytes per read, so small files need no buffer of the full limit
MOST_LINE = 1 << 20  # limit in bytes of a line
MOST_SKIPPED = 64 << 20  # limit in bytes of all longer lines, which are skipped


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a path exists; raises FileError if the system refuses to answer."""
    return _mode(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a regular file, or a link to one; raises FileError."""
    return stat.S_ISREG(_mode(path) or 0)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder, or a link to one; raises FileError."""
    return stat.S_ISDIR(_mode(path) or 0)


def _mode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise FileError(f"{shown(path)}: cannot be accessed: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Return the system's message without the path, which the caller adds."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def refusing(flag: str, path: str | os.PathLike[str], problem: str = "") -> Iterator[None]:
    """Turn an OSError of the `with` block into a FileError with the flag, path, problem and reason."""
    try:
        yield
    except OSError as error:
        prefix = f"{problem}: " if problem else ""
        raise FileError(f"{flag} {shown(path)}: {prefix}{reason(error)}".lstrip()) from error


def check_target(flag: str, path: str | os.PathLike[str], problem: str = "cannot be written") -> None:
    """Raise FileError, naming the flag, if it is certain that no file can be written at a path."""
    folder, cause = os.path.dirname(path) or ".", ""
    if is_folder(path):
        cause = "it is a folder, expected a file name"
    elif exists(path):  # a file or a device such as /dev/stdout; its folder does not matter
        cause = "" if os.access(path, os.W_OK) else "Permission denied"
    elif not is_folder(folder):
        cause = f"{'Not a directory' if exists(folder) else 'No such file or directory'}: {shown(folder)}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        cause = f"Permission denied: {shown(folder)}"
    if cause:
        raise FileError(f"{flag} {shown(path)}: {problem}: {cause}")


def open_file(path: str | os.PathLike[str], expected: str = "a file") -> FileIO:
    """Open a regular file, without a buffer; raises FileError for anything else.

    The file is opened without waiting for a pipe's other end, then checked. A check before opening
    would not help, because the file could be replaced in between.
    """
    try:
        target = os.path.realpath(path)  # the file that a link points to now
        file = open(target, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115 (returned)
    except IsADirectoryError:
        raise FileError(f"{shown(path)}: expected {expected}, found a folder: use the file in it") from None
    except FileNotFoundError:
        raise FileError(f"{shown(path)}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise FileError(f"{shown(path)}: cannot be read: {reason(error)}") from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise FileError(f"{shown(path)}: expected {expected}, found a device or pipe")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def open_in_place(path: str | os.PathLike[str], flags: int, links: int = 1) -> int:
    """Open a file to write it in place, with the arguments of `os.open`. Return its descriptor.

    Raise OSError with the path for a symbolic link, a file with more than `links` hard links, or anything
    that is not a regular file. Truncation (O_TRUNC) follows this check.
    """
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        handle = os.open(path, flags & ~os.O_TRUNC | safe, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "expected a file, found a link: remove the link"
        raise
    status = os.fstat(handle)
    is_file = stat.S_ISREG(status.st_mode)
    if is_file and status.st_nlink <= links:
        if flags & os.O_TRUNC and status.st_size:
            os.ftruncate(handle, 0)
        return handle
    os.close(handle)
    kind = f"{status.st_nlink} hard links to it: put a copy there" if is_file else "a device, folder or pipe"
    raise OSError(errno.EMLINK, f"expected a file with one name, found {kind}", os.fspath(path))


def fill(handle: int, view: memoryview, at: int) -> int:
    """Fill `view` from offset `at` of a file. Return the number of bytes read, fewer only at its end."""
    count = 0
    while count < len(view):
        nbytes = os.preadv(handle, [view[count:]], at + count)
        if not nbytes:
            break
        count += nbytes
    return count


def read_file(path: str | os.PathLike[str], most: int = MOST_JSON, expected: str = "a file") -> bytes:
    """Return all bytes of a regular file of at most `most` bytes; raises FileError."""
    with open_file(path, expected) as file:
        parts, remaining = list[bytes](), 0 if os.fstat(file.fileno()).st_size > most else most + 1
        with refusing("", path, "cannot be read"):
            while remaining and (part := file.read(min(remaining, READ_AT_ONCE))):
                parts.append(part)
                remaining -= len(part)
    if not remaining:
        raise FileError(f"{shown(path)}: expected {expected} of at most {most} bytes, found more")
    return b"".join(parts)


def read_lines(
    path: str | os.PathLike[str], needle: bytes, expected: str = "a file of lines"
) -> Iterator[bytes]:
    """Yield the lines of a regular file that contain `needle`, without line ends, in bounded memory.

    Lines longer than MOST_LINE bytes are skipped, because a crash may leave a run of zeros. Raise FileError
    if too many bytes are skipped or the file cannot be read. Lines without `needle` are skipped fast.
    """
    with open_file(path, expected) as file, refusing("", path, "cannot be read"):
        try:
            yield from _lines(file, needle)
        except ValueError:
            raise FileError(
                f"{shown(path)}: expected {expected} of at most {MOST_LINE} bytes each, found longer ones"
            ) from None


def _lines(file: BinaryIO, needle: bytes) -> Iterator[bytes]:
    rest, skipped = b"", 0
    skips = False  # true inside a line that is too long
    while block := file.read(READ_AT_ONCE):
        data = rest + block
        end = data.rfind(b"\n") + 1  # end of the last complete line
        rest, begin = data[end:], 0
        if skips and end:
            skips, begin = False, data.index(b"\n") + 1
        while begin < end and (at := data.find(needle, begin, end)) >= 0:  # cut out only matching lines
            begin, stop = max(begin, data.rfind(b"\n", begin, at) + 1), data.index(b"\n", at)
            if stop - begin < MOST_LINE:
                yield data[begin:stop]
            begin = stop + 1
        if skips or len(rest) >= MOST_LINE:
            skips, skipped, rest = True, skipped + len(rest), b""
            if skipped > MOST_SKIPPED:
                raise ValueError(skipped)
    if rest and needle in rest:
        yield rest
