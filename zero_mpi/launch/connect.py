"""The transport for a script or notebook of one's own, and one end for all of its ranks.

A rank of a script may fail, end early, or start something else than the others, who would wait for it for
ever. So `connect` sees to it that an exception which nobody catches ends all ranks, that a rank which ends is
known to those who wait for it, and that a wait in vain or of many minutes ends the job (`watchdog`). A
process by itself is left as it is: in a notebook nothing of this is installed.
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

VARIABLE = "ZERO_MPI_TIMEOUT"  # seconds, where `connect` is not told
TIMEOUT = 600.0  # as `--timeout` of the command


def connect(*, timeout: float | None = None, check: bool = False) -> Comm:
    """Messages between the ranks that a launcher has started; a `SerialComm` for a process by itself.

    So the same lines run under mpirun, as plain Python, in a notebook, and where no MPI is installed. It
    starts MPI where there is one. A rank computes on one thread unless the environment says
    otherwise, also where numpy was imported before zero_mpi. Collective.

    timeout   seconds that a rank may wait for others before the job ends with status 86 and says where each
              rank stands; 0 for never; left out: the variable ZERO_MPI_TIMEOUT, or 600
    check     compare each collective with those of the other ranks before it starts: slower, and the first
              that differs is an error on all ranks, with its sizes and types

    With the variable ZERO_MPI_BITS=portable, set before the program starts, bits are those of `--bits
    portable`.

    From now on an exception that nobody catches ends all ranks, and so does a rank that ends, by whatever
    status, while others wait for it. The collectives are those of one thread: in another one they raise
    UsageError. Raises UsageError if a launcher has started this process and there is no MPI, or no room for
    it in /dev/shm, and where bits cannot be portable; ValueError for a timeout that is no number of seconds.
    """
    ops.use_threads()
    world = find_world() if WatchedScript.running is None else WatchedScript.running.world
    if world.size == 1:
        settings(timeout, check)
        return SerialComm()
    from zero_mpi.comm.mpi import MPIComm

    script = WatchedScript.running = WatchedScript.running or WatchedScript(world)
    comm: Comm = MPIComm()
    script.limit(agreed(comm, "connect", lambda: settings(timeout, check)))
    if check:
        comm = CheckedComm(comm)
    return GuardedComm(comm)


def settings(timeout: Any, check: Any) -> tuple[float, dict[str, object]]:
    """The limit of a wait in seconds, and what ranks must share; raises ValueError."""
    instance("connect: check", check, bool, "True or False")
    limit, bits = time_limit(timeout), portable.asked()
    if bits not in portable.CHOICES:
        raise ValueError(f"{portable.VARIABLE}={bits}: expected one of {', '.join(portable.CHOICES)}")
    if bits == portable.PORTABLE:
        check_pins()
    return limit, {"timeout": limit, "check": check, portable.VARIABLE: bits}


def time_limit(timeout: Any) -> float:
    """What is given, or what the environment says, in seconds; raises ValueError."""
    if timeout is not None:
        return number("connect: timeout", timeout, least=0)
    text = os.environ.get(VARIABLE, "")
    try:
        return number(VARIABLE, float(text or TIMEOUT), least=0)
    except ValueError:
        raise ValueError(f"{VARIABLE}={text}: expected seconds, or 0 for never") from None


class WatchedScript:
    """What watches over a rank of a script, from the first `connect` to its end. Collective."""

    running: WatchedScript | None = None  # a process has one

    def __init__(self, world: World) -> None:
        self.world = world
        self._process, self._status = os.getpid(), 0
        self._watchdog = Watchdog(world.rank, 0, self._kill, only_waits=True)
        self._watchdog.beat("the script")
        folder = meeting_place(world)
        if folder is not None:
            self._watchdog.gather(folder.parent, world.comm, folder.name)
        self._hooks = sys.excepthook, threading.excepthook, sys.exit
        sys.excepthook, threading.excepthook, sys.exit = self._failed, self._thread_failed, self._exit
        atexit.register(self._ended)

    def limit(self, seconds: float) -> None:
        """How long a rank may wait from now on, 0 for ever."""
        self._watchdog.limit = seconds or math.inf

    # --------------------------------------------------------------------------------- ways to an end

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An exception was caught by nobody: end the job."""
        await_turn(self.world.rank)
        self._hooks[0](kind, error, trace)
        self._abort(f"rank {self.world.rank} of {self.world.size} failed")

    def _thread_failed(self, about: Any) -> None:
        """A thread has failed: that ends the job if the thread had started collectives."""
        of_ours = about.thread is not None and about.thread.ident in records.threads
        if of_ours:
            await_turn(self.world.rank)
        self._hooks[1](about)
        if of_ours:
            self._abort(f"thread {about.thread.name!r} of rank {self.world.rank} of {self.world.size} failed")

    def _abort(self, why: str) -> NoReturn:
        sys.stdout.flush()
        say(f"zero_mpi: {why} with the error above; ending the job")
        time.sleep(DRAIN)
        self._kill(FAILED)

    def _kill(self, status: int) -> NoReturn:
        """End all ranks at once; as the last thing, or another one would make the folder anew."""
        self._watchdog.clear()
        self.world.kill(status)

    def _exit(self, status: Any = None, /) -> NoReturn:
        """sys.exit, which leaves behind what it was called with: nobody else can tell it at the end."""
        if threading.current_thread() is threading.main_thread():
            self._status = (status or 0) & 0xFF if isinstance(status, int | None) else FAILED
        raise SystemExit(status)

    def _ended(self) -> None:
        """The process ends: wait for the others, and let those know who wait for this one."""
        if os.getpid() != self._process or self.world.mpi.Is_finalized():
            return  # a child; or a command, whose ranks have met
        sys.stdout.flush()
        records.ended = self._status
        with self.world.meter.waiting(END):
            meet(self.world, math.inf)
        self._watchdog.stop()


def meeting_place(world: World) -> Path | None:
    """Name a folder for small files that all ranks see: among temporary files, or in this one. Collective.

    On several hosts the first is each host's own, the second mostly one that they share. None: neither is.
    """
    name = f".zero_mpi-{secrets.token_hex(6)}"
    probes = [Path(tempfile.gettempdir(), name), Path.cwd() / name] if world.rank == 0 else []
    for probe in probes:
        with suppress(OSError):
            probe.mkdir(mode=0o700)
    probes = world.comm.broadcast_object(probes)  # when they are there: the others look at once
    seen = world.comm.allgather_object([probe.is_dir() for probe in probes])
    if world.rank == 0:
        for probe in probes:
            shutil.rmtree(probe, ignore_errors=True)
    return next((probe for probe, *by in zip(probes, *seen, strict=True) if all(by)), None)
