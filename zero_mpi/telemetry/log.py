"""Log of a run, by the logger "zero_mpi" of the standard library.

Users of the package as a library see nothing unless they configure that logger. A command installs one
handler: rank 0 logs at the level of `--log-level`, to stdout or above the progress bar; the other ranks log
only warnings, to stderr, with the prefix `[rank/size]`. At level debug all lines have this prefix.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from zero_mpi.errors import JobError
from zero_mpi.files.foreign import one_line, readable

DEBUG, INFO, WARNING, ERROR = "debug", "info", "warning", "error"
WORDS = {logging.WARNING: "warning: ", logging.ERROR: "error: "}

logger = logging.getLogger("zero_mpi")
logger.addHandler(logging.NullHandler())  # without a handler Python prints a library's warnings to stderr
debug, info, warning = logger.debug, logger.info, logger.warning


class Caution(str):
    """Text of a note that `log_note` logs as a warning."""


def log_note(note: str) -> None:
    (warning if isinstance(note, Caution) else info)("%s", note)


def info_text(title: str, text: str) -> None:
    """Log a multi-line text, such as a sample, below its title."""
    info("%s\n%s", one_line(title), text, extra={"is_text": True})


class ClosedPipe(JobError):
    """Error: the reader of a stream has closed it, as `head` does."""


@contextlib.contextmanager
def writing(stream: TextIO) -> Iterator[TextIO]:
    """Flush a stream at the end. If it cannot be written, drop what it still holds and raise JobError."""
    try:
        yield stream
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        kind = ClosedPipe if isinstance(error, BrokenPipeError) else JobError
        raise kind(f"cannot write to {stream.name.strip('<>')}: {error.strerror}") from error


class Lines(logging.Handler):
    """Log handler that writes each record as one line; a progress bar may replace `write` for a while.

    Errors of the stream are raised, so a full disk ends the run with this error.
    """

    def __init__(self, rank: int, size: int, level: str) -> None:
        super().__init__(max(getattr(logging, level.upper()), logging.WARNING if rank else 0))
        self.prefix = f"[{rank}/{size}] " if rank or level == DEBUG else ""
        self.to_stderr = rank > 0
        self.write: Callable[[str], object] = self.print

    def print(self, text: str) -> None:
        with writing(sys.stderr if self.to_stderr else sys.stdout) as stream:
            stream.write(f"{text}\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line, even if it has line ends; a text of `info_text` keeps its lines."""
        form = readable if getattr(record, "is_text", False) else one_line
        self.write(form(f"{self.prefix}{WORDS.get(record.levelno, '')}{record.getMessage()}"))


def install(rank: int, size: int, level: str = INFO) -> Lines:
    """Install the handler of this process; commands call this, an import never does."""
    remove()
    handler = Lines(rank, size, level)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if level == DEBUG else logging.INFO)
    logger.propagate = False  # handlers of the root logger would print all lines twice
    return handler


def remove() -> None:
    """Undo `install`."""
    for handler in installed():
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def installed() -> list[Lines]:
    """Return a list with the handler of a command; empty if there is none."""
    return [handler for handler in logger.handlers if isinstance(handler, Lines)]


def says(level: str) -> bool:
    """Return True if a command's handler shows lines of a level."""
    return any(handler.level <= getattr(logging, level.upper()) for handler in installed())


def write_through(write: Callable[[str], object] | None) -> None:
    """Send log lines to `write`, such as a progress bar's method; if None, print them again."""
    for handler in installed():
        handler.write = write or handler.print
