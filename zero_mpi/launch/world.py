"""Runner of a command on all ranks. All ranks end together, with one message and one exit status.

If a rank of an MPI job dies of an exception, the other ranks wait for it. So this module catches all
exceptions of a command.
"""

import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from zero_mpi import environment
from zero_mpi.comm import agree
from zero_mpi.comm.base import Comm
from zero_mpi.comm.guarded import records
from zero_mpi.comm.meter import Meter
from zero_mpi.comm.serial import SerialComm
from zero_mpi.comm.wrapper import CommWrapper
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.foreign import one_line
from zero_mpi.launch import dev_shm, ending, stopping
from zero_mpi.launch.ending import BAD_USAGE, DRAIN, FAILED, REQUEUE, await_turn, end_surely, say
from zero_mpi.launch.stopping import Stopped, signals, stopped_early

HELP, NO_LAUNCHER = {"-h", "--help", "--help-all", "--version"}, "start it without mpirun"
PATIENCE = 3.0  # seconds that a rank with a nonzero exit status waits for the others
END = "the end of the other ranks"
MPI_START = 600.0  # seconds for all ranks to reach MPI_Init
BEAT = 0.25  # minimum seconds between two beats of rank 0


class StopAwareComm(CommWrapper):
    """Communicator for agreements, which raise Stopped on all ranks if a signal came before the first step.

    folder_problem: returns, on rank 0, why the job has lost its run folder; all ranks then raise JobError
    """

    folder_problem: Callable[[], str] = str

    def allgather_object(self, value: Any) -> list[Any]:
        with self.meter.waiting("the agreement of all ranks"):
            answers = self._inner.allgather_object((signals.word(), value, self.folder_problem()))
        if reason := answers[0][2]:
            raise JobError(reason)
        signals.agreed([word for word, *_ in answers])
        return [reply for _, reply, _ in answers]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        with self.meter.waiting("the result of rank 0"):
            return self._inner.broadcast_object(value, root)


@dataclass(frozen=True)
class World:
    """The ranks that a command runs on."""

    rank: int
    size: int
    mpi: Any = None  # mpi4py's MPI module, or None for a single process
    shutdown: Any = None  # communicator that is used only at the end
    # Communicator for agreements of all ranks.
    comm: StopAwareComm = field(default_factory=lambda: StopAwareComm(SerialComm()), compare=False)
    # Functions that each rank calls when all ranks have reached the end.
    closing: list[Callable[[], None]] = field(default_factory=list, compare=False)
    # Functions of (status, reason), called by a rank that ends the job, or by rank 0 for all: with 0 or
    # 75 after all ranks have reached the end, with any other status before the ranks are ended.
    at_end: list[Callable[[int, str], None]] = field(default_factory=list, compare=False)

    @property
    def meter(self) -> Meter:
        return self.comm.meter

    @cached_property
    def node(self) -> Comm:
        """Communicator of the ranks of this node. The first access is collective."""
        if self.size == 1:
            return SerialComm()
        from zero_mpi.comm.mpi import MPIComm  # needs an MPI library
        from zero_mpi.comm.topology import node_communicator

        return MPIComm(node_communicator(self.mpi.COMM_WORLD), threaded=False)

    def check(self, problem: str = "") -> None:
        """Raise JobError on all ranks if the run folder is lost, or if rank 0 has a problem. Collective."""
        if reason := self.comm.broadcast_object(self.comm.folder_problem() or problem):
            raise JobError(reason)

    def report_end(self, status: int, reason: str = "") -> None:
        """Call the functions in `at_end` in reverse order, as a later one may depend on an earlier one."""
        for listener in reversed(self.at_end):
            listener(status, reason)

    def kill(self, status: int) -> NoReturn:
        """End all ranks immediately, from any thread."""
        ending.release_launcher()
        if self.mpi is not None:
            self.mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    def end(self, status: int, reason: str, text: str = "") -> NoReturn:
        """End all ranks without an agreement, from any thread, after printing `text`."""
        if text:
            say(text)
        self.report_end(status, reason)
        if text and self.mpi is not None:
            time.sleep(DRAIN)
        self.kill(status)

    def run_on_all(self, action: Callable[[], Any]) -> Any:
        """Return this rank's action(). All ranks raise the first UsageError or JobError of any rank.

        `action` must not communicate. It is not called if the run folder is lost, and a signal before the
        first step interrupts it. This method and the following methods are collective.
        """
        return agree.run_on_all(self.comm, lambda: self._unless_over(action))

    def _unless_over(self, action: Callable[[], Any]) -> Any:
        return None if self.comm.folder_problem() else signals.cut_short(action)

    def on_root(self, action: Callable[[], Any]) -> Any:
        """Call action() on rank 0 only; return its result there, None elsewhere; raise like `run_on_all`."""
        return self.run_on_all(lambda: action() if self.rank == 0 else None)

    def run_on_root(self, action: Callable[[], Any]) -> Any:
        """Call action() on rank 0 only; return its result on all ranks; raise like `run_on_all`."""
        return self.results(lambda: action() if self.rank == 0 else None)[0]

    def run_on_root_with_beat(self, action: Callable[[Callable[[], None]], Any]) -> Any:
        """Return rank 0's action(beat) on all ranks. A `beat()` counts as progress of the waiting ranks."""
        next_beat = 0.0

        def beat() -> None:
            nonlocal next_beat
            if time.monotonic() >= next_beat:
                self.comm.broadcast_object(True)
                next_beat = time.monotonic() + BEAT

        def work() -> Any:
            if self.rank:
                while self.comm.broadcast_object(None):
                    pass
                return None
            try:
                return signals.cut_short(lambda: action(beat))
            finally:
                self.comm.broadcast_object(False)

        return self.comm.broadcast_object(agree.run_on_all(self.comm, work))

    def results(self, action: Callable[[], Any]) -> list[Any]:
        """Return action() of every rank, in rank order; raise like `run_on_all`."""
        return agree.results(self.comm, lambda: self._unless_over(action))

    def node_by_node(self, action: Callable[[], Any]) -> None:
        """Call action() on one rank of each node, then on the others, which use the files that it made."""
        for turn in (True, False):
            if (self.node.rank == 0) == turn:
                signals.cut_short(action)
            with self.meter.waiting("the turns of the ranks of a node"):
                self.node.barrier()


Command = Callable[[World, Sequence[str]], int]


def find_world() -> World:
    """Return the MPI world; a world of one process if there is no MPI and no launcher.

    Raise UsageError if MPI cannot start.
    """
    dev_shm.check_space()
    if environment.under_launcher():  # if a rank exits before MPI_Init, the others wait in it
        faulthandler.dump_traceback_later(MPI_START, exit=True)
    try:
        from zero_mpi.comm.start_mpi import MPI
    except (ImportError, RuntimeError) as error:
        if environment.under_launcher():
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"started by an MPI launcher, but no MPI library can be loaded ({reason}): install one: pip "
                "install 'zero-mpi[mpich]'"
            ) from error
        return World(0, 1)
    finally:
        faulthandler.cancel_dump_traceback_later()
    from zero_mpi.comm.mpi import MPIComm

    ranks = MPI.COMM_WORLD
    shutdown = ranks.Dup()
    dev_shm.unname()  # after Dup, all ranks have mapped the library's segments
    comm = SerialComm() if ranks.Get_size() == 1 else MPIComm(threaded=False)
    return World(ranks.Get_rank(), ranks.Get_size(), MPI, shutdown, StopAwareComm(comm))


def run(
    name: str,
    command: Command,
    arguments: Sequence[str] | None = None,
    *,
    alone: bool = False,
    instead: str = NO_LAUNCHER,
) -> NoReturn:
    """Run command(world, arguments) on this rank and end the process with the job's exit status.

    `alone`: the command is for one process, so MPI starts only under a launcher, as it does for --help and
    --version; if the launcher started several ranks, the message says what to do `instead`.
    """
    world, problem = World(environment.launch_rank(), 1), ""  # used until MPI has started
    arguments = sys.argv[1:] if arguments is None else arguments
    wants_help = not HELP.isdisjoint(arguments)
    try:
        if environment.under_launcher() or not (alone or wants_help):
            world = find_world()
            stopping.handle_again()
        if alone and world.size > 1 and not wants_help:
            raise UsageError(f"{name} runs in one process: {instead}")
        signals.end_job = world.end
        status = command(world, arguments)
    except Stopped as stop:
        status, problem = stop.status, str(stop)
        if world.rank == 0:
            stopping.report(stopped_early(stop), is_error=status == FAILED)
    except KeyboardInterrupt:
        status, problem = end_interrupted(world), "interrupted"
    except (UsageError, JobError) as error:
        if world.rank == 0:
            say(f"zero_mpi {name}: error: {one_line(str(error))}")
        problem, status = one_line(str(error)), FAILED if isinstance(error, JobError) else BAD_USAGE
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else FAILED
        problem = f"exit with status {status}" if status else ""
    except BaseException as error:
        abort(world, error)
    finish(world, status, problem)


def end_interrupted(world: World) -> int:
    """Print that this process was interrupted and end the job; in a single process return the status."""
    stopping.say_interrupted()
    if world.size > 1:  # rank 0 has printed a line; another rank prints only if no lower rank was interrupted
        await_turn(world.rank)
        text = f"zero_mpi: rank {world.rank} of {world.size} was interrupted; ending the job"
        world.end(stopping.INTERRUPTED, "interrupted", text if world.rank else "")
    return stopping.INTERRUPTED


def abort(world: World, error: BaseException) -> NoReturn:
    """Print an exception with this rank's number and end the whole job."""
    await_turn(world.rank)
    text = "\n".join(map(one_line, "".join(traceback.format_exception(error)).rstrip().split("\n")))
    summary = f"zero_mpi: rank {world.rank} of {world.size} failed with the error above; ending the job"
    world.end(FAILED, f"rank {world.rank}: {text.splitlines()[-1]}", f"{text}\n{summary}")


def meet(world: World, patience: float) -> bool:
    """Wait until all ranks have called this; return False if some ranks have not after `patience` seconds."""
    request, deadline = world.shutdown.Ibarrier(), time.monotonic() + patience
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def finish(world: World, status: int, problem: str = "") -> NoReturn:
    """End this process with the agreed `status`, after all ranks have reached this function.

    A rank that gets here alone with a nonzero status ends the job, as the others would wait for it forever.
    A rank with status 0 waits without limit, because another rank may still be writing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    is_fine = status in (0, REQUEUE)
    if world.rank == 0 and not is_fine:
        world.report_end(status, problem)
    if world.shutdown is not None:
        records.ended = 0 if is_fine else None
        with world.meter.waiting(END):
            if not meet(world, PATIENCE if status else math.inf):
                suffix = f" ({problem})" if problem else ""
                text = f"zero_mpi: rank {world.rank} of {world.size} left alone{suffix}; ending the job"
                world.end(FAILED, f"rank {world.rank} left alone{suffix}", text)
    for close in world.closing:
        close()
    if world.rank == 0 and is_fine:  # all ranks have reached this point
        world.report_end(status, problem)
    if world.shutdown is not None and status == REQUEUE:
        meet(world, PATIENCE)  # rank 0 calls its functions first, as a released launcher may end all ranks
    ending.release_launcher()
    for thread in threading.enumerate():
        if thread.name == "zero_mpi saver":  # the run failed, and this thread may be inside the MPI library
            thread.join(PATIENCE)
            if thread.is_alive():
                end_surely(world.kill, status)
    if world.mpi is not None and not world.mpi.Is_finalized():
        world.mpi.Finalize()
    stopping.leave(status)
