"""Signals that ask a run to stop: noted from the program's first line on, obeyed where all ranks can.

A batch system, a person at a terminal and a terminal that is closed say the same: save and leave. A handler
only notes it, since a rank that left alone would leave the others waiting. Before the first step the ranks
agree on it wherever they agree on anything (`launch.world.Hearing`), later after each step. What takes long
by itself and moves nothing between ranks is left at once (`cut_short`). A thread hears signals too: the main
one may be inside the MPI library, where no handler of Python's runs. It answers a second Ctrl-C, and ends a
run that does not come to an agreement while it is prepared.

A program of this package listens from its first line to its last; in a script the command does that it calls.
Ctrl-C gives no traceback: `train` saves before it ends, any other command ends at once, with a line and
status 130, after it has tidied up if it was at work. An import, in a script or a notebook, changes no signal:
there an interrupt stays Python's KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from zero_mpi import environment
from zero_mpi.launch import open_mpi_reprieve
from zero_mpi.launch.ending import FAILED, REQUEUE, await_turn, end_surely

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
OF_PEOPLE = ("SIGINT", "SIGHUP")  # no batch system sends them, so nothing is requeued for them
START, PREPARING, STEPS, OVER = "start", "preparing", "steps", "over"
NO_STEP = "before the first step"
WHEN = {START: NO_STEP, PREPARING: NO_STEP, STEPS: "after this step", OVER: "at the end of the run"}
TWICE = 0.4  # seconds within which two are one: a launcher may hand on what the terminal has sent as well
GRACE = 3.0  # seconds for an agreement of all ranks while a run is prepared
STAGGER = 0.5  # seconds a rank: if all have to end the job, the first says so

INTERRUPTED = 130  # as a shell says it of a program that Ctrl-C has ended
Handler = Callable[[int, FrameType | None], None]

program = ""  # the command that this process was started for, such as "train"
_handled: dict[int, Handler] = {}  # the signals that this package has taken
Word = tuple[str, bool]


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


class Stopped(BaseException):
    """A signal ends the run before its first step. No `except Exception` takes it for a failure.

    All ranks raise it together, with the job's exit status; `StopSignals.cut_short` keeps back any other.
    """

    def __init__(self, name: str, *, again: bool = False) -> None:
        super().__init__(f"{name} {NO_STEP}")
        self.status = FAILED if again and name not in OF_PEOPLE else REQUEUE


class StopSignals:
    """What this process has been told.

    caught   the first signal's name, empty if there was none
    phase    what a signal finds: the program's start, a run that is prepared, its steps, what follows them
    again    the job before this one was stopped before its first step too; rank 0 knows
    ending   ends all ranks with a status and a reason, from any thread
    """

    def __init__(self) -> None:
        self.caught, self.phase, self.again = "", START, False
        self.ending: Callable[[int, str], object] = lambda status, reason: os._exit(status)
        self._listens = self._may_leave = self._gives_up = False
        self._heard: dict[signal.Signals, float] = {}

    def listen(self) -> None:
        """Note signals from now on; nothing happens outside of the main thread."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in SIGNALS:
            handle(number, self._note)
        hide_unraisable(Stopped)
        outlive_terminal()
        threading.Thread(target=self._listen, args=(read,), name="zero_mpi signals", daemon=True).start()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Listen while a command runs, where the program that calls it does not. Also a decorator.

        Under a launcher a command that was stopped listens on: ranks may hear one signal at different times.
        """
        before = {} if self._listens else {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        try:
            yield
        finally:
            if before and self._listens and not (self.caught and environment.under_launcher()):
                for number, handler in before.items():
                    signal.signal(number, handler or signal.SIG_DFL)  # None: a library has it
                os.close(signal.set_wakeup_fd(self._wakeup))  # the end of the thread
                self.caught, self.phase, self._heard = "", START, {}
                self._listens = self._gives_up = False

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._watch_preparation()

    # ---------------------------------------------------------------------- before the first step

    def word(self) -> Word:
        """What this rank says where the ranks agree: a signal that should end what is prepared; `again`."""
        return (self.caught if self.phase == PREPARING else ""), self.again

    def agreed(self, words: Sequence[Word]) -> None:
        """Raise Stopped if any rank's word is a signal. All ranks call it with the same words."""
        name = next((name for name, _ in words if name), "")
        if name:
            self.phase, self.caught = OVER, self.caught or name
            raise Stopped(name, again=words[0][1])

    def cut_short(self, action: Callable[[], Any]) -> Any:
        """action(), which must not communicate; None where a signal comes before its end.

        The caller goes on to where the ranks agree. A program's start and steps are not cut short.
        """
        if self.phase not in (PREPARING, OVER):
            return action()
        try:
            try:
                self._may_leave = True
                return None if self.caught else action()
            finally:
                self._may_leave = False
        except Stopped:
            return None

    def _watch_preparation(self) -> None:
        if self.caught and self.phase == PREPARING and not self._gives_up:
            self._gives_up = True
            threading.Thread(target=self._give_up, name="zero_mpi stop", daemon=True).start()

    def _give_up(self) -> None:
        """End the job if the ranks do not come to an agreement; nothing has been done that could be lost."""
        time.sleep(GRACE)
        await_turn(environment.launch_rank(), STAGGER)
        if self.phase == PREPARING:
            stopped = Stopped(self.caught, again=self.again)
            report(stopped_early(stopped), is_error=stopped.status == FAILED)
            self._leave(stopped.status, str(stopped))

    # ----------------------------------------------------------------------------- what hears them

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Python's handler of a signal, which runs in the main thread between two instructions."""
        self.caught = self.caught or signal.Signals(number).name
        if self._may_leave:
            self._may_leave = False
            raise Stopped(self.caught)

    def _listen(self, read: int) -> None:
        while numbers := os.read(read, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._hear(signal.Signals(number))
        os.close(read)

    def _hear(self, number: signal.Signals) -> None:
        """React in the listening thread, as soon as a signal comes."""
        is_first, now = not self._heard, time.monotonic()
        since = now - self._heard.setdefault(number, now)
        self.caught = self.caught or number.name
        if number == signal.SIGTERM and self.phase == STEPS:
            open_mpi_reprieve.hold()
        if number == signal.SIGINT and since > TWICE:
            self._end_now()
        if is_first or (number == signal.SIGINT and since == 0):
            self._acknowledge(number)
        self._watch_preparation()

    def _acknowledge(self, number: signal.Signals) -> None:
        if environment.launch_rank() == 0:
            stopping = f"stopping {WHEN[self.phase]}"
            once_more = f"{stopping}; once more to stop now"
            report(once_more if number == signal.SIGINT else f"{number.name}: {stopping}")

    def _end_now(self) -> NoReturn:
        if environment.launch_rank() == 0:
            report("stopped at once; what was saved is complete", is_error=True)
        self._leave(INTERRUPTED, "SIGINT, twice")

    def _leave(self, status: int, reason: str) -> NoReturn:
        """End all ranks, or this one where the MPI library is in the way."""
        end_surely(lambda status: self.ending(status, reason), status)


def stopped_early(stopped: Stopped) -> str:
    """What a person is told of a run that was stopped before its first step."""
    if stopped.status == REQUEUE:
        return f"stopped by {stopped}: nothing to save; run the same command to go on"
    from zero_mpi.launch.limits import find_job, process_age

    job, age = find_job(), process_age()
    left = f"{job.at_start:.0f} s before the end of {job.name}, " if job and job.at_start else ""
    return (
        f"{stopped}, as in the job before: such jobs would follow each other for ever; the signal came {left}"
        f"{age:.0f} s after the program's start: make its lead (Slurm: --signal=B:USR1@SECONDS) shorter "
        "than the time limit, or the limit longer (--time, walltime)"
    )


def was_stopped_early(reason: str) -> bool:
    """Whether the reason that a job has left is that a batch system stopped it before its first step."""
    name, _, when = reason.partition(" ")
    return when == NO_STEP and name not in OF_PEOPLE


signals = StopSignals()


def start(name: str, module: str) -> None:
    """Run `main` of a module, the command `name`; signals are heard before the import, which is slow."""
    global program
    program = name
    if name == "train":
        signals.listen()
    else:
        handle(signal.SIGINT, signal.default_int_handler)
        hide_unraisable(KeyboardInterrupt)
    try:
        import_module(module).main()
    except KeyboardInterrupt:
        say_interrupted()
        os._exit(INTERRUPTED)
