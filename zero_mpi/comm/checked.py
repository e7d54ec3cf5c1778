"""Compares each collective with what the other ranks start, before it starts (`--check-collectives`).

All ranks must start the same collectives in the same order. One that does not leaves the others waiting, or
mixes bytes of one buffer with those of another. Here each rank first describes what it is about to start; the
digests of these texts are brought together over communicators of their own, and if one differs all ranks
learn which rank starts what. The collectives themselves, and so their bits, are those of the transport below.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.arrays import Array
from zero_mpi.comm.base import Comm, Handle, Memory, Partition, Piece
from zero_mpi.comm.clocks import Offset
from zero_mpi.comm.files import OutputFile
from zero_mpi.comm.forwarding import Forwarding
from zero_mpi.comm.meter import collective
from zero_mpi.comm.patience import wait_until
from zero_mpi.errors import JobError

DIGEST = 16  # bytes


def odd_one(values: Sequence[str]) -> tuple[int, str] | None:
    """The first rank whose value is not that of most ranks, and the value of most; None if all are equal.

    Where as many have one as have another, rank 0 is taken to be right.
    """
    usual = Counter(values).most_common(1)[0][0]  # the first met, among equals
    return next(((rank, usual) for rank, value in enumerate(values) if value != usual), None)


class CheckedComm(Forwarding):
    """The transport `inner`, whose collectives are compared first. Collective.

    Every collective raises JobError on all ranks where they start different ones.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.sums_in_place, self.replicates_by_node = inner.sums_in_place, inner.replicates_by_node
        self._control = inner.background()
        self._number = 0  # of the next collective

    def _check(self, kind: str, label: str = "", *about: str) -> None:
        """Raise JobError on all ranks unless all of them start this."""
        mine = f"{collective((kind, label))} ({', '.join(about)})" if about else collective((kind, label))
        number, self._number = self._number, self._number + 1
        with self.meter.waiting(f"the check before {kind}", label):
            if self._all_equal(mine):
                return
            texts = self._control.allgather_object(mine)
        odd = odd_one(texts)
        assert odd is not None, "digests differ and texts do not"
        rank, usual = odd
        others = "rank 0 starts" if len(texts) == 2 else f"{texts.count(usual)} of {len(texts)} ranks start"
        raise JobError(
            f"the ranks start different collectives: number {number} (from 0) is {texts[rank]} on rank "
            f"{rank}, where {others} {usual}"
        )

    def _all_equal(self, mine: str) -> bool:
        """Whether all ranks describe the same; what is under way below is pushed on meanwhile."""
        digest = np.frombuffer(hashlib.sha256(mine.encode()).digest()[:DIGEST], np.uint8)
        found = np.empty(DIGEST * self._control.size, np.uint8)
        handle = self._control.allgather(digest, found, Partition(found.size, self._control.size), "digests")

        def arrived() -> bool:
            self._inner.progress()
            return handle.test()

        wait_until(arrived, crowded=True)
        handle.wait()
        return bool((found.reshape(-1, DIGEST) == found[:DIGEST]).all())

    # -------------------------------------------------------------------------------------- on arrays

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        place = "its slices in place" if shard is None else "from slices"
        self._check("allgather", label, elements(full), cut(partition), place)
        return super().allgather(shard, full, partition, label)

    def reduce_scatter(
        self,
        full: Array,
        out: Array,
        partition: Partition,
        *,
        contributors: int | None = None,
        accumulate: bool = False,
        label: str = "",
    ) -> Handle:
        given = f"{self.size if contributors is None else contributors} contributors"
        how = "added to what is there" if accumulate else "from zero"
        self._check("reduce_scatter", label, elements(full), cut(partition), given, how)
        return super().reduce_scatter(
            full, out, partition, contributors=contributors, accumulate=accumulate, label=label
        )

    def allreduce(self, array: Array, label: str = "") -> Handle:
        self._check("allreduce", label, elements(array))
        return super().allreduce(array, label)

    def sum_vector(self, values: Array) -> Array:
        self._check("sum_vector", "", f"{np.shape(values)}")
        return self._inner.sum_vector(values)

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        self._check("broadcast", label, elements(array), f"root {root}")
        return super().broadcast(array, root, label)

    def gather(
        self, part: Array | None, room: Array | None, piece: Piece, root: int = 0, label: str = ""
    ) -> None:
        self._check("gather", label, f"elements {piece.start} to {piece.stop}", f"root {root}")
        super().gather(part, room, piece, root, label)

    # ------------------------------------------------------------------------------------ on anything

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        self._check("gather_object", "", f"root {root}")
        return super().gather_object(value, root)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self._check("broadcast_object", "", f"root {root}")
        return super().broadcast_object(value, root)

    def allgather_object(self, value: Any) -> list[Any]:
        self._check("allgather_object")
        return super().allgather_object(value)

    def barrier(self) -> None:
        self._check("barrier")
        super().barrier()

    def clock_offset(self) -> Offset:
        self._check("clock_offset")
        return super().clock_offset()

    def background(self) -> Comm:
        self._check("background")
        return CheckedComm(super().background())

    def create_file(self, path: Path) -> OutputFile:
        self._check("create_file", path.name)
        return super().create_file(path)

    # ------------------------------------------------------------------------------------------ memory

    def node_owners(self) -> Comm:
        self._check("node_owners")
        owners = self._inner.node_owners()
        return self if owners is self._inner else CheckedComm(owners)

    def memory(
        self, wholes: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> Memory:
        lengths = [whole.length for whole in wholes]
        asked = f"wholes {lengths}", f"buffers {list(buffers)}", f"gathers {list(gathers)}"
        self._check("memory", "", *asked)
        return self._inner.memory(wholes, buffers, gathers)

    def publish(self) -> None:
        self._inner.publish()

    def await_published(self) -> None:
        self._inner.await_published()

    def await_readers(self) -> None:
        self._check("await_readers")
        self._inner.await_readers()

    def close(self) -> None:
        self._check("close")
        self._control.close()
        super().close()


def elements(array: Array) -> str:
    """How many of what."""
    return f"{array.size} {array.dtype.name}"


def cut(partition: Partition) -> str:
    """How a buffer is dealt out."""
    return f"{partition.length} cut for {partition.parts} at multiples of {partition.quantum}"
