"""Program that starts rank 0 of many simulated ranks, which all answer with rank 0's own messages.

    python tests/pretended_ranks.py RANKS FLAGS...

It runs the functions of `zero_mpi.train` up to the first step, and prints the cost as JSON:
opened files, messages, their sent and received bytes, and bytes of Python objects that are kept. Arrays are
not counted: their slices become shorter with more ranks, and the plan covers them.
"""

import gc
import json
import pickle
import sys
import tracemalloc
from typing import Any

from zero_mpi import SerialComm
from zero_mpi.comm import kinds
from zero_mpi.comm.base import Comm, Handle, ModuleMemory
from zero_mpi.comm.partition import dealt_out
from zero_mpi.config.command_line import parse
from zero_mpi.launch.consistency import check_installation, own_source
from zero_mpi.launch.stopping import signals
from zero_mpi.launch.world import StopAwareComm, World
from zero_mpi.train import setup
from zero_mpi.train.command import stand_guard
from zero_mpi.train.resolve import resolve
from zero_mpi.train.setup import TransportChoice
from zero_mpi.train.trainer import Trainer

PER_NODE = 8
OF_OBJECTS = tracemalloc.DomainFilter(inclusive=True, domain=0)  # NumPy's arrays are in another domain


class Echo(SerialComm):
    """Communicator of rank 0 of `size` ranks, PER_NODE per node; each rank echoes rank 0's message."""

    kind, sums_in_place = kinds.MPI, False
    said = heard = messages = 0  # bytes that rank 0 sent; bytes that it received; number of its messages

    def __init__(self, size: int) -> None:
        self.size = size

    def _say(self, value: Any, times: int) -> list[Any]:
        word = pickle.dumps(value)
        Echo.said += len(word)
        Echo.heard += len(word) * times
        Echo.messages += 1
        return [pickle.loads(word) for _ in range(times)]

    def memory(self, full: Any, buffers: Any, gathers: Any = ()) -> ModuleMemory:
        return Comm.memory(self, full, buffers, gathers)

    def broadcast(self, array: Any, root: int = 0, label: str = "") -> Handle:
        Echo.said += array.nbytes
        Echo.messages += 1
        return super().broadcast(array, root, label)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._say(value, 1)[0]

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        return self._say(value, self.size)

    allgather_object = gather_object

    def nodes(self) -> list[int]:
        return [rank // PER_NODE for rank in range(self.size)]

    def background(self) -> Comm:
        return Echo(self.size)

    def split(self, group: int) -> Comm:
        raise NotImplementedError("a start needs no group")


def begin(ranks: int, flags: list[str]) -> Trainer:
    world = World(0, ranks, comm=StopAwareComm(Echo(ranks)))
    world.__dict__["node"] = Echo(min(ranks, PER_NODE))
    setup.choose_transport = lambda *_: TransportChoice(Echo(ranks))
    signals.end_job = world.end
    check_installation(world)
    config = world.run_on_all(lambda: parse(flags))
    watchdog, outcome = stand_guard(world, config)
    session = setup.build(world, resolve(world, config))
    trainer = Trainer(world, session, watchdog, outcome)
    trainer.observers = trainer.observe(trainer.begin())
    return trainer


def main(ranks: int, flags: list[str]) -> None:
    opened: list[str] = []
    begin(PER_NODE, [*flags, "--out", "before"])  # loads all modules
    own_source.cache_clear()
    dealt_out.cache_clear()
    Echo.said = Echo.heard = Echo.messages = 0
    sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
    tracemalloc.start()
    trainer = begin(ranks, [*flags, "--out", "run"])
    gc.collect()
    memory = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([OF_OBJECTS]).traces)
    figures = {"files": len(opened), "said": Echo.said, "heard": Echo.heard, "messages": Echo.messages}
    print(json.dumps(figures | {"kept": memory, "ranks": trainer.world.size}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
