"""Wrappers of a transport, which forward the calls that they do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zero_mpi import environment
from zero_mpi.comm.base import DONE, Comm, Handle, ModuleMemory, ReduceScatter, wait_until
from zero_mpi.comm.partition import Chunk, Partition
from zero_mpi.device.types import Array

if TYPE_CHECKING:
    from zero_mpi.comm.mpi import MPIComm


def _forward(name: str, facts: Callable[..., tuple[str, ...]] = lambda *arguments: ()) -> Any:
    """Return a method that reports and forwards a collective; `facts` returns facts equal on all ranks."""

    def method(self: CommWrapper, *arguments: Any, **keywords: Any) -> Any:
        self.on_collective(name, "", *facts(*arguments, **keywords))
        return getattr(self._inner, name)(*arguments, **keywords)

    return method


class CommWrapper(Comm):
    """Wrapper that forwards every call to `inner`.

    `on_collective` is called before each collective. `wrapped` wraps the handles of transfers, and `wrap`
    wraps other transports that `inner` makes.
    """

    def __init__(self, inner: Comm) -> None:
        self._inner, self.kind, self.meter = inner, inner.kind, inner.meter
        self.rank, self.size, self.exact = inner.rank, inner.size, inner.exact
        self.sums_in_place, self.replicates_by_node = inner.sums_in_place, inner.replicates_by_node
        self._group: tuple[Comm, Comm] | None = None  # inner shard group, and its wrapper

    def on_collective(self, kind: str, label: str = "", *arguments: Array | Partition | str) -> None:
        """Note a collective that is about to start. `arguments` must be equal on all ranks; for an array,
        size and type must be equal. Arrays are not passed as text, since few implementations need text."""

    def wrapped(self, inner: Handle) -> Handle:
        """Return the handle that the caller gets for a handle of the inner transport."""
        return inner

    def wrap(self, comm: Comm) -> Comm:
        """Wrap another transport of all or some of these ranks in the same way. Collective."""
        return comm

    @property
    def about(self) -> str:
        return self._inner.about

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        source = "slices in place" if shard is None else "from slices"
        self.on_collective("allgather", label, full, partition, source)
        return self.wrapped(self._inner.allgather(shard, full, partition, label))

    def _reduce(self, call: ReduceScatter) -> Handle:
        ranks = f"{call.contributors} contributors"
        mode = "added to the output" if call.accumulate else "from zero"
        self.on_collective("reduce_scatter", call.label, call.full, call.partition, ranks, mode)
        return self.wrapped(self._inner.reduce_scatter(**vars(call)))

    def allreduce(self, array: Array, label: str = "") -> Handle:
        self.on_collective("allreduce", label, array)
        return self.wrapped(self._inner.allreduce(array, label))

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        self.on_collective("broadcast", label, array, f"root {root}")
        return self.wrapped(self._inner.broadcast(array, root, label))

    def gather(
        self, part: Array | None, buffer: Array | None, chunk: Chunk, root: int = 0, label: str = ""
    ) -> None:
        self.on_collective("gather", label, f"elements {chunk.start} to {chunk.stop}", f"root {root}")
        self._inner.gather(part, buffer, chunk, root, label)

    gather_object = _forward("gather_object", lambda value, root=0: (f"root {root}",))
    broadcast_object = _forward("broadcast_object", lambda value, root=0: (f"root {root}",))
    allgather_object, barrier, barrier_readers, nodes, close = map(
        _forward, ("allgather_object", "barrier", "barrier_readers", "nodes", "close")
    )

    def memory(
        self, full: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        lengths = f"full arrays {[partition.length for partition in full]}"
        self.on_collective("memory", "", lengths, f"buffers {list(buffers)}", f"gathers {list(gathers)}")
        return self._inner.memory(full, buffers, gathers)

    def progress(self) -> None:
        self._inner.progress()

    def signal_written(self) -> None:
        self._inner.signal_written()

    def wait_written(self) -> None:
        self._inner.wait_written()

    def background(self) -> Comm:
        self.on_collective("background")
        return self.wrap(self._inner.background())

    def split(self, group: int) -> Comm:
        self.on_collective("split")
        return self.wrap(self._inner.split(group))

    def shard_group(self) -> Comm:
        self.on_collective("shard_group")
        group = self._inner.shard_group()
        if group is self._inner:
            return self
        if self._group is None or self._group[0] is not group:
            self._group = group, self.wrap(group)
        return self._group[1]


class ProgressingWrapper(CommWrapper):
    """Wrapper over MPI messages that advances all transfers while it waits, as other ranks may need them."""

    def __init__(self, inner: MPIComm, ranks_here: int) -> None:
        super().__init__(inner)
        self._library = inner
        self._crowded = ranks_here > environment.node_cores()

    def wait_until(self, ready: Callable[[], bool], kind: str, label: str = "") -> None:
        """Advance the transfers in progress until `ready()`; `kind` and `label` name the collective."""

        def pushed() -> bool:
            self.progress()
            if ready():
                return True
            self._library.poke_progress()
            return False

        with self.meter.waiting(kind, label):
            wait_until(pushed, self._crowded)

    def wrapped(self, inner: Handle) -> Handle:
        return DONE if inner is DONE else ProgressingHandle(self, inner)


class ProgressingHandle(Handle):
    """A transfer whose wait also advances all other transfers."""

    def __init__(self, comm: ProgressingWrapper, inner: Handle) -> None:
        self._comm, self._inner, self.kind, self.label = comm, inner, inner.kind, inner.label

    def test(self) -> bool:
        self._comm.progress()
        return self._inner.test()

    def wait(self) -> None:
        if not self._inner.test():
            self._comm.wait_until(self._inner.test, self.kind, self.label)
        self._inner.wait()  # the transfer is complete; this raises its error, if any
