"""Ctrl-C without a traceback, from the first line of a program of this package to its last.

`train` saves before it ends (`stopping`); any other command ends at once: with a line and status 130, after
it has tidied up if it was at work. An import, in a script or a notebook, changes no signal: there an
interrupt stays Python's KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from zero_mpi import environment

INTERRUPTED = 130  # as a shell says it of a program that Ctrl-C has ended
Handler = Callable[[int, FrameType | None], None]

program = ""  # the command that this process was started for, such as "train"
_handled: dict[int, Handler] = {}  # the signals that this package has taken


def handle(number: int, handler: Handler) -> None:
    """Take a signal, unless whoever started this process wants it not to hear it.

    So nohup does with SIGHUP, and a shell with SIGINT in the background; a launcher hands on what it gets.
    """
    ignored = signal.getsignal(number) is signal.SIG_IGN
    kept = number == signal.SIGHUP or (number == signal.SIGINT and not environment.under_launcher())
    if not (ignored and kept):
        signal.signal(number, handler)
        _handled[number] = handler


def handle_again() -> None:
    """Take back what a library has taken meanwhile: MPICH's UCX takes SIGHUP when MPI starts."""
    for number, handler in _handled.items():
        signal.signal(number, handler)


def say_interrupted() -> None:
    """One line, of rank 0."""
    if environment.launch_rank() == 0:
        report("interrupted", is_error=True)


def leave(status: int) -> NoReturn:
    """End this process; what it has handled finds nothing to end any more."""
    for number in _handled:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


def hide_unraisable(kind: type[BaseException]) -> None:
    """Say nothing where an exception that a handler raised came up in a finalizer, which swallows it."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, kind):
            before(unraisable)

    sys.unraisablehook = hook


class Terminal(io.FileIO):
    """A terminal that may be closed: what it does not take any more is lost, and no reason to fail."""

    def write(self, data: Any) -> int:
        """Write data; what comes after the terminal's end counts as written."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outlive_terminal() -> None:
    """Let stdout and stderr survive the end of the terminal that they are."""
    for name, handle in (("stdout", 1), ("stderr", 2)):
        was = getattr(sys, name)
        if os.isatty(handle) and was is getattr(sys, f"__{name}__"):  # no notebook's
            terminal = io.BufferedWriter(Terminal(handle, "w", closefd=False))
            new = io.TextIOWrapper(terminal, was.encoding, was.errors, line_buffering=True)
            setattr(sys, name, new)


def report(text: str, *, is_error: bool = False) -> None:
    """One line from whatever thread: through the log if the command has set one up, errors to stderr."""
    log = sys.modules.get("zero_mpi.telemetry.log")
    with contextlib.suppress(OSError):
        if is_error or log is None or not log.installed():
            name = f"zero_mpi {program}".rstrip()
            os.write(2 if is_error else 1, f"{name}: {text}\n".encode(errors="backslashreplace"))
        else:
            log.info("%s", text)
