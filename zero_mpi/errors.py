"""The exceptions that a command turns into one line on stderr, from rank 0 only.

`UsageError` means "the user can mend this", exit status 2. It is a `ValueError`, so that callers of the
library need not know the class to catch it. `JobError` is a failure of the machine that all ranks share.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UsageError(ValueError):
    """Bad usage or bad input: says what was expected, what came, and what to do."""


class FileError(UsageError):
    """A file is not as it must be: file, expected, found."""


class JobError(RuntimeError):
    """A failure that all ranks know of and raise together: one line from rank 0, exit status 1."""


def explain(error: OSError) -> str:
    """The file that cannot be written, and the cause."""
    return f"cannot write {error.filename}: {error.strerror or error}"


def first_line(error: BaseException) -> str:
    """Return the first line that an error says, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def writing() -> Iterator[None]:
    """Let an OSError of the body, which writes a file, be a JobError of one line with file and cause."""
    try:
        yield
    except OSError as error:
        raise JobError(explain(error)) from error


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError of the body the file's name: the system's calls on open files leave it out."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


@contextmanager
def prefixed(text: str) -> Iterator[None]:
    """Let a FileError of the body begin with a text: a flag, or a file."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{text} {error}") from None


def import_optional(user: str, extra: str, *modules: str, otherwise: str = "") -> Any:
    """The modules of an optional library, imported; one of them, or a tuple.

    `user` is the flag or thing that needs it, `extra` the package's extra that brings it, `otherwise` what
    else helps. UsageError where a module cannot be imported.
    """
    package = modules[0].partition(".")[0]
    try:
        importlib.import_module(package)
        found = tuple(map(importlib.import_module, modules))
    except ImportError as error:
        why = first_line(error.__cause__ or error)  # CuPy's own text has a frame
        remedy = f"pip install 'zero-mpi[{extra}]'{otherwise}"
        raise UsageError(f"{user} needs {package} ({why}): {remedy}") from error
    return found[0] if len(found) == 1 else found
