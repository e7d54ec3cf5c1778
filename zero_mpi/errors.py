"""The exceptions that a command turns into one line on stderr, from rank 0 only.

`UsageError` means "the user can fix this", exit status 2. It is a `ValueError`, so that callers of the
library can catch it without knowing the class. `JobError` is a failure that all ranks raise together.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UsageError(ValueError):
    """Bad usage or bad input; the message says what was expected, what was found, and what to do."""


class FileError(UsageError):
    """A file with invalid content; the message names the file, what was expected and what was found."""


class JobError(RuntimeError):
    """A failure that all ranks raise together: one line from rank 0, exit status 1."""


def explain(error: OSError) -> str:
    return f"cannot write {error.filename}: {error.strerror or error}"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def writing() -> Iterator[None]:
    """Turn an OSError of the body, which writes a file, into a one-line JobError with file and cause."""
    try:
        yield
    except OSError as error:
        raise JobError(explain(error)) from error


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an OSError of the body, because system calls on open files omit it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


@contextmanager
def prefixed(text: str) -> Iterator[None]:
    """Put a text, such as a flag or a file, in front of the message of a FileError of the body."""
    try:
        yield
    except FileError as error:
        raise FileError(f"{text} {error}") from None


def import_optional(user: str, extra: str, *modules: str, otherwise: str = "") -> Any:
    """Import modules of an optional library; return the module, or a tuple of several.

    `user`: the flag or feature that needs the library; `extra`: the extra of this package that installs it;
    `otherwise`: an alternative remedy. Raises UsageError if a module cannot be imported.
    """
    package = modules[0].partition(".")[0]
    try:
        importlib.import_module(package)
        libraries = tuple(map(importlib.import_module, modules))
    except ImportError as error:
        reason = first_line(error.__cause__ or error)  # CuPy frames its own message with lines of =
        remedy = f"pip install 'zero-mpi[{extra}]'{otherwise}"
        raise UsageError(f"{user} needs {package} ({reason}): {remedy}") from error
    return libraries[0] if len(libraries) == 1 else libraries
