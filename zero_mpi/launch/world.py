"""Runs a command on all ranks, so that it ends on all ranks: one line, one traceback, one exit status.

An MPI job whose rank dies of an exception hangs: the others wait for it. So whatever leaves a command is
caught here. Bad input that every rank knows of ends with status 2 and a line from rank 0; an error of one
rank is printed with its number and aborts the job.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from zero_mpi import environment
from zero_mpi.comm.meter import Meter
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.text import one_line
from zero_mpi.launch import interrupts, leftovers, open_mpi_reprieve, shm_room
from zero_mpi.launch.stopping import Stopped, signals, stopped_early

BAD_USAGE, FAILED, REQUEUE = 2, 1, 75
PATIENCE = 3.0  # seconds that a rank which ends with a bad status waits for the others
DRAIN = 0.1  # seconds for the launcher to pass on what was said: at an abort it drops what it has not read
STAGGER = (
    0.3  # seconds a rank: if all fail at once, the first prints and ends the job before the others speak
)


@dataclass(frozen=True)
class World:
    """The ranks that a command runs on. `mpi` is mpi4py's MPI module, or None for a single process.

    at_end: called with the exit status and the reason when this rank ends the command, or rank 0 for all of
    them: with 0 or 75 once all ranks have come to the end, with another status before they are ended.
    """

    rank: int
    size: int
    mpi: Any = None
    farewell: Any = None  # a communicator for the end alone
    meter: Meter = field(default_factory=Meter, compare=False)
    at_end: list[Callable[[int, str], None]] = field(default_factory=list, compare=False)

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

    def everyone(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks. Collective.

        Raises Stopped on all ranks if a signal has told one of them to stop before the first step.
        """
        found = [(signals.word(), value)]
        if self.mpi is not None:
            with self.meter.waiting("the agreement of all ranks"):
                found = self.mpi.COMM_WORLD.allgather(found[0])
        signals.agreed([word for word, _ in found])
        return [theirs for _, theirs in found]

    def agree(self, problem: UsageError | JobError | None) -> None:
        """Raise the first rank's problem on all ranks, if any has one. Collective."""
        for rank, found in enumerate(self.everyone(problem)):
            if found is not None:
                where = f"rank {rank}: " if rank else ""
                kind = JobError if isinstance(found, JobError) else UsageError
                raise kind(f"{where}{found}")

    def together(self, action: Callable[[], Any]) -> Any:
        """action() on every rank; if it raises UsageError or JobError on any, all raise the first.

        It must not communicate.
        """
        result: Any = None
        problem: UsageError | JobError | None = None
        try:
            result = signals.cut_short(action)
        except (UsageError, JobError) as error:
            problem = error
        self.agree(problem)
        return result

    def share(self, value: Any) -> Any:
        """Rank 0's value on all ranks. Collective."""
        if self.mpi is None:
            return value
        with self.meter.waiting("the word of rank 0"):
            return self.mpi.COMM_WORLD.bcast(value)

    def rank_on_node(self) -> int:
        """This rank's number among those of its node. Collective."""
        if self.mpi is None:
            return 0
        node = self.mpi.COMM_WORLD.Split_type(self.mpi.COMM_TYPE_SHARED)
        number = int(node.Get_rank())
        node.Free()
        return number

    def node_by_node(self, action: Callable[[], Any]) -> None:
        """action() on one rank of each node first and then on its others, which find what it prepared."""
        if self.mpi is None:
            signals.cut_short(action)
            return
        node = self.mpi.COMM_WORLD.Split_type(self.mpi.COMM_TYPE_SHARED)
        for turn in (True, False):
            if (node.Get_rank() == 0) == turn:
                signals.cut_short(action)
            with self.meter.waiting("the turns of the ranks of a node"):
                node.Barrier()
        node.Free()

    def on_root(self, action: Callable[[], Any]) -> Any:
        """action() on rank 0 only, its result there and None elsewhere; raises as `together`."""
        return self.together(lambda: action() if self.rank == 0 else None)


def find_world() -> World:
    """The MPI world; a single process where there is no MPI and no launcher asks for one.

    Raises UsageError where MPI cannot start.
    """
    shm_room.check()
    try:
        from zero_mpi.comm.start_mpi import MPI
    except (ImportError, RuntimeError) as error:
        if environment.under_launcher():
            raise UsageError(
                f"started by an MPI launcher, but no MPI library can be loaded ({first_line(error)}); "
                "install one: pip install 'zero-mpi[mpich]'"
            ) from error
        return World(0, 1)
    world = MPI.COMM_WORLD
    found = World(world.Get_rank(), world.Get_size(), MPI, world.Dup())
    leftovers.unname()  # all ranks have come to Dup, hence hold the library's segments
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def run(
    name: str,
    command: Callable[[World, Sequence[str]], int],
    arguments: Sequence[str],
    *,
    alone: bool = False,
) -> NoReturn:
    """Run command(world, arguments) on this rank and end the process with the job's exit status.

    `alone`: the command is for one process, so MPI is started only where a launcher started us.
    """
    world, problem = World(environment.launch_rank(), 1), ""  # until it is known
    try:
        if not alone or environment.under_launcher():
            world = find_world()
            interrupts.handle_again()
        signals.ending = partial(end_now, world)
        with interrupts.at_work():
            status = command(world, arguments)
    except Stopped as stopped:
        status, problem = stopped.status, str(stopped)
        if world.rank == 0:
            interrupts.report(stopped_early(stopped), is_error=status == FAILED)
    except KeyboardInterrupt:
        interrupts.say_interrupted()
        status, problem = interrupts.INTERRUPTED, "interrupted"
        if world.size > 1:
            end_interrupted(world)
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


def say(text: str) -> None:
    """One line on stderr, in one write so that lines of several ranks do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def end_now(world: World, status: int, reason: str) -> NoReturn:
    """End all ranks without asking them, from any thread."""
    world.tell(status, reason)
    world.kill(status)


def end_interrupted(world: World) -> NoReturn:
    """End all ranks after a Ctrl-C: rank 0 has said so, another one only if it alone was interrupted."""
    if world.rank:
        time.sleep(STAGGER * min(world.rank, 20))
        say(f"zero_mpi: rank {world.rank} of {world.size} was interrupted; ending the job")
        time.sleep(DRAIN)
    end_now(world, interrupts.INTERRUPTED, "interrupted")


def abort(world: World, error: BaseException) -> NoReturn:
    """Print an exception with this rank's number and end the whole job."""
    time.sleep(STAGGER * min(world.rank, 20))
    text = "\n".join(map(one_line, "".join(traceback.format_exception(error)).rstrip().split("\n")))
    say(f"{text}\nzero_mpi: rank {world.rank} of {world.size} failed with the error above; ending the job")
    world.tell(FAILED, f"rank {world.rank}: {text.splitlines()[-1]}")
    if world.mpi is not None:
        time.sleep(DRAIN)
    world.kill(FAILED)


def leave_together(world: World, status: int, problem: str) -> None:
    """Wait for the other ranks to end too.

    A rank that leaves alone with a bad status ends the job, or the others would wait for it for ever; one
    that is done has patience, for another may still be writing.
    """
    request, until = world.farewell.Ibarrier(), time.monotonic() + PATIENCE
    with world.meter.waiting("the end of the other ranks"):
        while not request.Test():
            if status != 0 and time.monotonic() > until:
                why = f" ({problem})" if problem else ""
                say(f"zero_mpi: rank {world.rank} of {world.size} left alone{why}; ending the job")
                world.tell(FAILED, f"rank {world.rank} left alone{why}")
                time.sleep(DRAIN)
                world.kill(FAILED)
            time.sleep(0.01)


def let_it_be_told(world: World) -> None:
    """Wait until rank 0 has told the end: a launcher that was held back may then end all ranks."""
    request, until = world.farewell.Ibarrier(), time.monotonic() + PATIENCE
    while not request.Test() and time.monotonic() < until:
        time.sleep(0.01)


def finish(world: World, status: int, problem: str = "") -> NoReturn:
    """End this process with `status`, which all ranks have agreed on."""
    sys.stdout.flush()
    sys.stderr.flush()
    fine = status in (0, REQUEUE)
    if world.rank == 0 and not fine:
        world.tell(status, problem)
    if world.farewell is not None:
        leave_together(world, status, problem)
    if world.rank == 0 and fine:  # now that all ranks have come here
        world.tell(status, problem)
    if world.farewell is not None and status == REQUEUE:
        let_it_be_told(world)
    open_mpi_reprieve.release()
    if world.mpi is not None and not world.mpi.Is_finalized():
        world.mpi.Finalize()
    interrupts.leave(status)
