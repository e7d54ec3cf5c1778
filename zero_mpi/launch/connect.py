"""`connect`: communicator for a user's script or notebook. An error on one rank ends all ranks.

If a rank of a script fails, ends early, or starts a different collective, the other ranks would wait for it
forever. So after `connect` an uncaught exception ends all ranks, and a wait that cannot succeed or takes many
minutes ends the job (`watchdog`). In a single process `connect` installs nothing.
"""

from __future__ import annotations

import atexit
import math
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from zero_mpi import ops
from zero_mpi.arguments import instance, number
from zero_mpi.comm.agree import agreed
from zero_mpi.comm.base import Comm
from zero_mpi.comm.guarded import CheckedComm, GuardedComm, records
from zero_mpi.comm.serial import SerialComm
from zero_mpi.environment import portable
from zero_mpi.launch.consistency import check_pins
from zero_mpi.launch.ending import DRAIN, FAILED, await_turn, say
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import END, World, find_world, meet

VARIABLE = "ZERO_MPI_TIMEOUT"  # timeout in seconds, used if `connect` gets none
TIMEOUT = 600.0  # seconds, like the default of `--timeout`


def connect(*, timeout: float | None = None, check: bool = False) -> Comm:
    """Return the communicator of the ranks that a launcher has started; a `SerialComm` for a single process.

    The same script runs under mpirun, as plain Python, in a notebook, and without an MPI installation. If MPI
    is installed, it is started. A rank computes on one thread by default, even if numpy was imported before
    zero_mpi. Collective.

    timeout   seconds that a rank may wait for others before the job prints the state of each rank and ends
              with status 86; 0: no limit; default: the variable ZERO_MPI_TIMEOUT, else 600
    check     compare each collective across ranks before it starts (slower); at the first difference all
              ranks raise an error that shows sizes and types

    If the variable ZERO_MPI_BITS=portable is set before the program starts, results are computed as with
    `--bits portable`.

    From now on all ranks end if a rank has an uncaught exception or ends, with any status, while others wait
    for it. Only one thread may start collectives; other threads get UsageError. Raise UsageError if a
    launcher has started this process and there is no MPI or too little space in /dev/shm, or if portable bits
    are impossible; ValueError for a timeout that is not a number of seconds.
    """
    ops.use_threads()
    world = find_world() if WatchedScript.current is None else WatchedScript.current.world
    if world.size == 1:
        settings(timeout, check)
        return SerialComm()
    from zero_mpi.comm.nodes.hybrid import MPIComm

    script = WatchedScript.current = WatchedScript.current or WatchedScript(world)
    comm: Comm = MPIComm()
    script.limit(agreed(comm, "connect", lambda: settings(timeout, check)))
    if check:
        comm = CheckedComm(comm)
    return GuardedComm(comm)


def settings(timeout: Any, check: Any) -> tuple[float, dict[str, object]]:
    """Return the limit of a wait in seconds, and settings that must be equal on all ranks."""
    instance("connect: check", check, bool, "True or False")
    limit, bits = time_limit(timeout), portable.requested()
    if bits not in portable.CHOICES:
        raise ValueError(f"{portable.VARIABLE}={bits}: expected one of {', '.join(portable.CHOICES)}")
    if bits == portable.PORTABLE:
        check_pins()
    return limit, {"timeout": limit, "check": check, portable.VARIABLE: bits}


def time_limit(timeout: Any) -> float:
    """Return the timeout in seconds, by default the environment's value; raise ValueError."""
    if timeout is not None:
        return number("connect: timeout", timeout, least=0)
    text = os.environ.get(VARIABLE, "")
    try:
        return number(VARIABLE, float(text or TIMEOUT), least=0)
    except ValueError:
        raise ValueError(f"{VARIABLE}={text}: expected seconds, or 0 for never") from None


class WatchedScript:
    """Watchdog and exit hooks of a script on a rank, from the first `connect` to the exit. Collective."""

    current: WatchedScript | None = None  # at most one per process

    def __init__(self, world: World) -> None:
        self.world = world
        self._process, self._status = os.getpid(), 0
        self._watchdog = Watchdog(world.rank, 0, self._kill, only_waits=True)
        self._watchdog.beat("the script")
        folder = meeting_place(world)
        if folder is not None:
            self._watchdog.gather(folder.parent, world.comm, folder.name)
        self._hooks = sys.excepthook, threading.excepthook, sys.exit
        sys.excepthook, threading.excepthook, sys.exit = self._on_error, self._on_thread_error, self._exit
        atexit.register(self._on_exit)

    def limit(self, seconds: float) -> None:
        """Set the seconds that a rank may wait from now on; 0: no limit."""
        self._watchdog.limit = seconds or math.inf

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        await_turn(self.world.rank)
        self._hooks[0](kind, error, trace)
        self._abort(f"rank {self.world.rank} of {self.world.size} failed")

    def _on_thread_error(self, args: Any) -> None:
        """End the job after the failure of a thread that had started collectives."""
        is_ours = args.thread is not None and args.thread.ident in records.threads
        if is_ours:
            await_turn(self.world.rank)
        self._hooks[1](args)
        if is_ours:
            self._abort(f"thread {args.thread.name!r} of rank {self.world.rank} of {self.world.size} failed")

    def _abort(self, failure: str) -> NoReturn:
        sys.stdout.flush()
        say(f"zero_mpi: {failure} with the error above; ending the job")
        time.sleep(DRAIN)
        self._kill(FAILED)

    def _kill(self, status: int) -> NoReturn:
        self._watchdog.clear()
        self.world.kill(status)

    def _exit(self, status: Any = None, /) -> NoReturn:
        """Record the exit status, because exit hooks cannot read it, then exit like sys.exit."""
        if threading.current_thread() is threading.main_thread():
            self._status = (status or 0) & 0xFF if isinstance(status, int | None) else FAILED
        raise SystemExit(status)

    def _on_exit(self) -> None:
        """Report the end of this process to the other ranks, and wait until they end too."""
        if os.getpid() != self._process or self.world.mpi.Is_finalized():
            return  # a child process, or a command whose ranks have already ended together
        sys.stdout.flush()
        records.ended = self._status
        with self.world.meter.waiting(END):
            meet(self.world, math.inf)
        self._watchdog.stop()


def meeting_place(world: World) -> Path | None:
    """Return a path in the temporary or current folder, if all ranks share that folder. Collective.

    With several hosts, the temporary folder is local and the current folder is usually shared.
    """
    name, probes = f".zero_mpi-{secrets.token_hex(6)}", list[Path]()
    if world.rank == 0:
        probes = [Path(tempfile.gettempdir(), name), Path.cwd() / name]
        for probe in probes:
            with suppress(OSError):
                probe.mkdir(mode=0o700)
    probes = world.comm.broadcast_object(probes)  # sent after mkdir, as ranks look for the folder immediately
    views = world.comm.allgather_object([probe.is_dir() for probe in probes])
    if world.rank == 0:
        for probe in probes:
            shutil.rmtree(probe, ignore_errors=True)
    return next((probe for probe, *flags in zip(probes, *views, strict=True) if all(flags)), None)
