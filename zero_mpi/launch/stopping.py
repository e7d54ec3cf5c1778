"""Stop signals of a run: recorded from the start of the program, handled once all ranks agree on them.

A handler only records the signal, because a rank that exits alone leaves the others waiting. Ranks exchange
recorded signals in every agreement before the first step (`launch.world.StopAwareComm`), then after each
step. A signal immediately interrupts long local work without communication (`cut_short`). A thread also
receives signals, because no Python handler runs while the main thread is inside the MPI library. The thread
reacts to a second Ctrl-C, and ends a run whose ranks reach no agreement during its preparation.

The train program records signals from its first line on. A script that calls a command's function must first
call `signals.listen()`. On Ctrl-C `train` saves and `tokenize` ends so that it can be resumed. Any other
command prints a line and ends immediately with status 130. Importing the package changes no signal handler.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from zero_mpi import environment
from zero_mpi.launch.ending import FAILED, REQUEUE, await_turn, end_surely, hold_launcher

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
OF_PEOPLE = ("SIGINT", "SIGHUP")  # people send these signals, batch systems do not, so a job is not requeued
START, PREPARING, STEPS, OVER = "start", "preparing", "steps", "over"
NO_STEP = "before the first step"
WHEN = {START: NO_STEP, PREPARING: NO_STEP, STEPS: "after this step", OVER: "at the end of the run"}
TWICE = 0.4  # seconds within which two signals count as one, as terminal and launcher may both send it
GRACE = 3.0  # seconds for all ranks to agree while a run is prepared
STAGGER = 0.5  # seconds per rank, so that only the first prints if all ranks end the job

INTERRUPTED = 130  # a shell's exit status for a program ended by Ctrl-C
Handler = Callable[[int, FrameType | None], None]

program = ""  # the command that this process was started for, such as "train"
_handled: dict[int, Handler] = {}  # handlers that this package has installed
Word = tuple[str, bool]


def handle(number: int, handler: Handler) -> None:
    """Install a handler of a signal, unless nohup or a shell has made this process ignore the signal.

    nohup does so for SIGHUP, a shell for SIGINT of background jobs. Under a launcher SIGINT is handled.
    """
    is_ignored = signal.getsignal(number) is signal.SIG_IGN
    is_exempt = number == signal.SIGHUP or (number == signal.SIGINT and not environment.under_launcher())
    if not (is_ignored and is_exempt):
        signal.signal(number, handler)
        _handled[number] = handler


def handle_again() -> None:
    """Install all handlers again, since libraries replace some: UCX replaces SIGHUP's when MPI starts."""
    for number, handler in _handled.items():
        signal.signal(number, handler)


def say_interrupted() -> None:
    if environment.launch_rank() == 0:
        report("interrupted", is_error=True)


def leave(status: int) -> NoReturn:
    """End this process; ignore the handled signals from now on."""
    for number in _handled:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


def hide_unraisable(kind: type[BaseException]) -> None:
    """Hide Python's message for exceptions of this kind that a signal handler raises inside a finalizer."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda error: None if issubclass(error.exc_type, kind) else hook(error)


class Terminal(io.FileIO):
    """Output stream to a terminal; after the terminal is closed, output is dropped without an error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def open_streams() -> None:
    """Open closed standard streams as /dev/null; let stdout escape characters that its encoding lacks."""
    # Each open takes the lowest free descriptor.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open until the end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def outlive_terminal() -> None:
    """Make stdout and stderr work without errors after their terminal is closed."""
    for name, handle in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if os.isatty(handle) and stream is getattr(sys, f"__{name}__"):  # a notebook's stream is not replaced
            terminal = io.BufferedWriter(Terminal(handle, "w", closefd=False))
            wrapper = io.TextIOWrapper(terminal, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, wrapper)


def report(text: str, *, is_error: bool = False) -> None:
    """Print one line from any thread: errors to stderr, notes to the log, or to stdout without a log."""
    log = sys.modules.get("zero_mpi.telemetry.log")
    with contextlib.suppress(OSError):
        if is_error or log is None or not log.installed():
            name = f"zero_mpi {program}".rstrip()
            os.write(2 if is_error else 1, f"{name}: {text}\n".encode(errors="backslashreplace"))
        else:
            log.info("%s", text)


class Stopped(BaseException):
    """Exception: a signal ends the run before its first step. `except Exception` does not catch it.

    All ranks raise it together, with the job's exit status. `cut_short` catches it if a handler raised it.
    """

    def __init__(self, name: str, *, again: bool = False) -> None:
        super().__init__(f"{name} {NO_STEP}")
        self.status = FAILED if again and name not in OF_PEOPLE else REQUEUE


class StopSignals:
    """State of the stop signals of this process.

    name     the first signal's name, empty if there was none
    phase    phase of the run: start of the program, preparation, steps, or the time after the steps
    repeats  True on rank 0 if the previous job was also stopped before its first step
    end_job  function that ends all ranks with a status and a reason, from any thread
    """

    def __init__(self) -> None:
        self.name, self.phase, self.repeats = "", START, False
        self.end_job: Callable[[int, str], object] = lambda status, reason: os._exit(status)
        self._listens = self._may_leave = self._gives_up = False
        self._arrivals: dict[signal.Signals, float] = {}

    def listen(self) -> None:
        if self._listens:
            return
        self._listens = True
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            handle(number, self._handle)
        hide_unraisable(Stopped)
        outlive_terminal()
        threading.Thread(target=self._listen, args=(reader,), name="zero_mpi signals", daemon=True).start()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._end_preparation()

    # ---------------------------------------------------------------------- before the first step

    def word(self) -> Word:
        """Return this rank's part of an agreement: a signal that ends the preparation, and `repeats`."""
        return (self.name if self.phase == PREPARING else ""), self.repeats

    def agreed(self, words: Sequence[Word]) -> None:
        """Raise Stopped if a rank's `word` names a signal. All ranks call it with the words of all ranks."""
        name = next((name for name, _ in words if name), "")
        if name:
            self.phase, self.name = OVER, self.name or name
            raise Stopped(name, again=words[0][1])

    def cut_short(self, action: Callable[[], Any]) -> Any:
        """Return action(), which must not communicate; None if a signal interrupts it.

        The caller then continues to the next agreement. A program's start and steps are never interrupted.
        """
        if self.phase not in (PREPARING, OVER):
            return action()
        with contextlib.suppress(Stopped):
            try:
                self._may_leave = True
                return None if self.name else action()
            finally:
                self._may_leave = False
        return None

    def _end_preparation(self) -> None:
        if self.name and self.phase == PREPARING and not self._gives_up:
            self._gives_up = True
            threading.Thread(target=self._give_up, name="zero_mpi stop", daemon=True).start()

    def _give_up(self) -> None:
        """End the job if the ranks reach no agreement after a signal in the preparation."""
        time.sleep(GRACE)  # before the first step no result can be lost
        await_turn(environment.launch_rank(), STAGGER)
        if self.phase == PREPARING:
            stop = Stopped(self.name, again=self.repeats)
            report(stopped_early(stop), is_error=stop.status == FAILED)
            self._leave(stop.status, str(stop))

    # ---------------------------------------------------------------------------------- handlers

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread; Python calls this between two instructions."""
        self.name = self.name or signal.Signals(number).name
        if self._may_leave:
            self._may_leave = False
            raise Stopped(self.name)

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        """Handle a signal in the listening thread, as soon as it arrives."""
        is_first, now = not self._arrivals, time.monotonic()
        gap = now - self._arrivals.setdefault(number, now)
        self.name = self.name or number.name
        if number == signal.SIGTERM and self.phase == STEPS:
            hold_launcher()
        if number == signal.SIGINT and gap > TWICE:
            if environment.launch_rank() == 0:
                report("stopped immediately; saved checkpoints are complete", is_error=True)
            self._leave(INTERRUPTED, "SIGINT, twice")
        if environment.launch_rank() == 0 and (is_first or (number == signal.SIGINT and gap == 0)):
            notice = f"stopping {WHEN[self.phase]}"
            hint = f"{notice}; send the signal again to stop now"
            report(hint if number == signal.SIGINT else f"{number.name}: {notice}")
        self._end_preparation()

    def _leave(self, status: int, reason: str) -> NoReturn:
        end_surely(lambda status: self.end_job(status, reason), status)


def stopped_early(stop: Stopped) -> str:
    """Return the message for a run that was stopped before its first step."""
    if stop.status == REQUEUE:
        return f"stopped by {stop}: nothing to save; run the same command to continue"
    from zero_mpi.environment.limits import process_age
    from zero_mpi.launch.time_limit import find_job

    job, age = find_job(), process_age()
    margin = f"{job.at_start:.0f} s before the end of {job.name}, " if job and job.at_start else ""
    return (
        f"{stop}, as in the job before; to avoid requeueing forever, this job fails. The signal came "
        f"{margin}{age:.0f} s after the start: send it later (Slurm: --signal=B:USR1@SECONDS), or raise the "
        "time limit (--time, walltime)"
    )


def was_stopped_early(reason: str) -> bool:
    """Return True if a job's recorded reason is that a batch system stopped it before its first step."""
    name, _, moment = reason.partition(" ")
    return moment == NO_STEP and name not in OF_PEOPLE


signals = StopSignals()


def start(name: str, module: str) -> None:
    """Install signal handlers, then import a module, which is slow, and run its `main` as command `name`."""
    global program
    program = name
    open_streams()
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
