"""Runs a command on all ranks, so that it ends on all ranks: one line, one traceback, one exit status.

An MPI job whose rank dies of an exception hangs: the others wait for it. So whatever leaves a command is
caught here. Bad input that every rank knows of ends with status 2 and a line from rank 0; an error of one
rank is printed with its number and aborts the job.
"""

from __future__ import annotations

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
from zero_mpi.launch import dev_shm, open_mpi_reprieve, stopping
from zero_mpi.launch.ending import BAD_USAGE, DRAIN, FAILED, REQUEUE, await_turn, end_surely, say
from zero_mpi.launch.stopping import Stopped, signals, stopped_early

HELP, NO_LAUNCHER = {"-h", "--help", "--version"}, "leave mpirun out"
PATIENCE = 3.0  # seconds that a rank which ends with a bad status waits for the others
END = "the end of the other ranks"
MPI_START = 600.0  # seconds for all ranks to come to MPI_Init
BEAT = 0.25  # seconds at least between signs of life of rank 0


class Hearing(CommWrapper):
    """What ranks agree by. Raises on all of them Stopped if one was told to stop before the first step.

    lost: says on rank 0 why the run folder is not the job's any more; all raise JobError then
    """

    lost: Callable[[], str] = str

    def allgather_object(self, value: Any) -> list[Any]:
        with self.meter.waiting("the agreement of all ranks"):
            told = self._inner.allgather_object((signals.word(), value, self.lost()))
        if why := told[0][2]:
            raise JobError(why)
        signals.agreed([word for word, *_ in told])
        return [theirs for _, theirs, _ in told]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        with self.meter.waiting("the word of rank 0"):
            return self._inner.broadcast_object(value, root)


@dataclass(frozen=True)
class World:
    """The ranks that a command runs on.

    mpi       mpi4py's MPI module, or None for a single process
    farewell  a communicator for the end alone
    comm      what the ranks agree by (`comm.agree`)
    closing   called on each rank once all ranks have come to the end
    at_end    called with the exit status and the reason when this rank ends the command, or rank 0 for all:
              with 0 or 75 once all ranks have come to the end, with another status before they are ended
    """

    rank: int
    size: int
    mpi: Any = None
    farewell: Any = None
    comm: Hearing = field(default_factory=lambda: Hearing(SerialComm()), compare=False)
    closing: list[Callable[[], None]] = field(default_factory=list, compare=False)
    at_end: list[Callable[[int, str], None]] = field(default_factory=list, compare=False)

    @property
    def meter(self) -> Meter:
        """What tells where this rank waits for the others."""
        return self.comm.meter

    @cached_property
    def node(self) -> Comm:
        """The ranks of this one's node. Collective where it is asked for first."""
        if self.size == 1:
            return SerialComm()
        from zero_mpi.comm.mpi import MPIComm
        from zero_mpi.comm.topology import node_communicator

        return MPIComm(node_communicator(self.mpi.COMM_WORLD), threaded=False)

    def tell(self, status: int, reason: str = "") -> None:
        """Tell those who want to know the end: who came last first, for it may lean on those before."""
        for listener in reversed(self.at_end):
            listener(status, reason)

    def kill(self, status: int) -> NoReturn:
        """End all ranks at once, from any thread."""
        open_mpi_reprieve.release()
        if self.mpi is not None:
            self.mpi.COMM_WORLD.Abort(status)
        os._exit(status)

    def end(self, status: int, reason: str, text: str = "") -> NoReturn:
        """End all ranks without asking them, from any thread; `text` is said before."""
        if text:
            say(text)
        self.tell(status, reason)
        if text and self.mpi is not None:
            time.sleep(DRAIN)
        self.kill(status)

    def together(self, action: Callable[[], Any]) -> Any:
        """action() on every rank; if it raises UsageError or JobError on any, all raise the first.

        It must not communicate, and is not done in a folder that is lost. Collective, as are the next ones.
        A signal before the first step ends it.
        """
        return agree.together(self.comm, lambda: None if self.comm.lost() else signals.cut_short(action))

    def on_root(self, action: Callable[[], Any]) -> Any:
        """action() on rank 0 only, its result there and None elsewhere; raises as `together`."""
        return self.together(lambda: action() if self.rank == 0 else None)

    def from_root(self, action: Callable[[], Any]) -> Any:
        """action() on rank 0 only, and its result on all ranks; raises as `together`."""
        return self.results(lambda: action() if self.rank == 0 else None)[0]

    def from_root_with_beat(self, action: Callable[[Callable[[], None]], Any]) -> Any:
        """action(beat) of rank 0 as `from_root`; each `beat()` is progress of the ranks that wait as well."""
        due = 0.0

        def beat() -> None:
            nonlocal due
            if time.monotonic() >= due:
                self.comm.broadcast_object(True)
                due = time.monotonic() + BEAT

        def work() -> Any:
            while self.rank and self.comm.broadcast_object(None):
                continue
            try:
                return None if self.rank else signals.cut_short(lambda: action(beat))
            finally:
                if self.rank == 0:
                    self.comm.broadcast_object(False)

        return self.comm.broadcast_object(agree.together(self.comm, work))

    def results(self, action: Callable[[], Any]) -> list[Any]:
        """action() of every rank, in order of ranks; raises as `together`."""
        return agree.results(self.comm, lambda: None if self.comm.lost() else signals.cut_short(action))

    def node_by_node(self, action: Callable[[], Any]) -> None:
        """action() on one rank of each node first and then on its others, which find what it prepared."""
        for turn in (True, False):
            if (self.node.rank == 0) == turn:
                signals.cut_short(action)
            with self.meter.waiting("the turns of the ranks of a node"):
                self.node.barrier()


Command = Callable[[World, Sequence[str]], int]


def find_world() -> World:
    """The MPI world; a single process where there is no MPI and no launcher asks for one.

    Raises UsageError where MPI cannot start.
    """
    dev_shm.check_room()
    if environment.under_launcher():  # which lets ranks wait in MPI_Init for one that ended before it
        faulthandler.dump_traceback_later(MPI_START, exit=True)
    try:
        from zero_mpi.comm.start_mpi import MPI
    except (ImportError, RuntimeError) as error:
        if environment.under_launcher():
            why = str(error).partition("\n")[0]
            raise UsageError(
                f"started by an MPI launcher, but no MPI library can be loaded ({why}); install one: "
                "pip install 'zero-mpi[mpich]'"
            ) from error
        return World(0, 1)
    finally:
        faulthandler.cancel_dump_traceback_later()
    from zero_mpi.comm.mpi import MPIComm

    ranks = MPI.COMM_WORLD
    farewell = ranks.Dup()
    dev_shm.unname()  # all ranks have come to Dup, hence hold the library's segments
    comm = SerialComm() if ranks.Get_size() == 1 else MPIComm(threaded=False)
    return World(ranks.Get_rank(), ranks.Get_size(), MPI, farewell, Hearing(comm))


def run(
    name: str, command: Command, arguments: Sequence[str], *, alone: bool = False, instead: str = NO_LAUNCHER
) -> NoReturn:
    """Run command(world, arguments) on this rank and end the process with the job's exit status.

    `alone`: the command is for one process, so MPI is started only where a launcher started us, as for
    --help and --version, and where that are several ranks they are told what to do `instead`.
    """
    world, problem = World(environment.launch_rank(), 1), ""  # until it is known
    try:
        helping = not HELP.isdisjoint(arguments)
        if environment.under_launcher() or not (alone or helping):
            world = find_world()
            stopping.handle_again()
        if alone and world.size > 1 and not helping:
            raise UsageError(f"{name} runs in one process: {instead}")
        signals.ending = world.end
        status = command(world, arguments)
    except Stopped as stopped:
        status, problem = stopped.status, str(stopped)
        if world.rank == 0:
            stopping.report(stopped_early(stopped), is_error=status == FAILED)
    except KeyboardInterrupt:
        stopping.say_interrupted()
        status, problem = stopping.INTERRUPTED, "interrupted"
        if world.size > 1:  # rank 0 has said so, another one only if it alone was interrupted
            await_turn(world.rank)
            text = f"zero_mpi: rank {world.rank} of {world.size} was interrupted; ending the job"
            world.end(status, problem, text if world.rank else "")
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


def abort(world: World, error: BaseException) -> NoReturn:
    """Print an exception with this rank's number and end the whole job."""
    await_turn(world.rank)
    text = "\n".join(map(one_line, "".join(traceback.format_exception(error)).rstrip().split("\n")))
    why = f"zero_mpi: rank {world.rank} of {world.size} failed with the error above; ending the job"
    world.end(FAILED, f"rank {world.rank}: {text.splitlines()[-1]}", f"{text}\n{why}")


def meet(world: World, patience: float) -> bool:
    """Wait until all ranks have come here; False if they have not after so many seconds."""
    request, until = world.farewell.Ibarrier(), time.monotonic() + patience
    while not request.Test():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def leave_together(world: World, status: int, problem: str) -> None:
    """Wait for the other ranks to end too.

    A rank that leaves alone with a bad status ends the job, or the others would wait for it for ever; one
    that is done has patience, for another may still be writing.
    """
    with world.meter.waiting(END):
        if not meet(world, PATIENCE if status else math.inf):
            why = f" ({problem})" if problem else ""
            text = f"zero_mpi: rank {world.rank} of {world.size} left alone{why}; ending the job"
            world.end(FAILED, f"rank {world.rank} left alone{why}", text)


def finish(world: World, status: int, problem: str = "") -> NoReturn:
    """End this process with `status`, which all ranks have agreed on."""
    sys.stdout.flush()
    sys.stderr.flush()
    fine = status in (0, REQUEUE)
    if world.rank == 0 and not fine:
        world.tell(status, problem)
    if world.farewell is not None:
        records.ended = 0 if fine else None
        leave_together(world, status, problem)
    for close in world.closing:
        close()
    if world.rank == 0 and fine:  # now that all ranks have come here
        world.tell(status, problem)
    if world.farewell is not None and status == REQUEUE:
        meet(world, PATIENCE)  # rank 0 has told it then: a launcher that was held back may end all ranks
    open_mpi_reprieve.release()
    for thread in threading.enumerate():
        if thread.name == "zero_mpi saver":  # behind a run that failed; it may be inside the MPI library
            thread.join(PATIENCE)
            if thread.is_alive():
                end_surely(world.kill, status)
    if world.mpi is not None and not world.mpi.Is_finalized():
        world.mpi.Finalize()
    stopping.leave(status)
