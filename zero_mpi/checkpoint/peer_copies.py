"""Copies of a run's state in the memory of hosts: each rank's slices at home, and at a rank of another host.

A copy takes no disk, and a lost host does not take it along. Two versions alternate, and no rank begins to
overwrite one before all have the other whole: `save` ends by an agreement. So whenever ranks die, there is a
step of which every slice is whole on the hosts that are left, as long as no two neighbours are lost at once
(`comm.neighbours`). Nothing is allocated from the third copy on but what a GPU hands to the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from xxhash import xxh3_128

from zero_mpi.checkpoint.copy_file import PIECE, SLOTS, CopyFile, CopyPlace, remove
from zero_mpi.checkpoint.copy_record import ELEMENT, CopyRecord, Run
from zero_mpi.checkpoint.saver import parts_of
from zero_mpi.checkpoint.state import Description, TrainingProgress
from zero_mpi.comm import Comm
from zero_mpi.comm.agree import together
from zero_mpi.comm.neighbours import Neighbours
from zero_mpi.device.types import Array
from zero_mpi.errors import writing
from zero_mpi.sharding.optimizer import ShardedAdamW


class PeerCopies:
    """Makes copies of an optimizer's state, and of what is kept for others. Every method is collective.

    comm        what the ranks agree by
    neighbours  carries copies to other hosts; None where there is one rank
    tick        is told what is going on, for a watchdog
    """

    def __init__(
        self,
        comm: Comm,
        neighbours: Neighbours | None,
        place: CopyPlace,
        optimizer: ShardedAdamW,
        description: Description,
        *,
        tick: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._comm, self._neighbours, self._place = comm, neighbours, place
        self._optimizer, self._description, self._tick = optimizer, description, tick
        self._runs = tuple(run for run, _ in runs_of(optimizer, description))
        self.nbytes: int = ELEMENT * sum(size for *_, size in self._runs)  # of this rank's slices
        self.kept: dict[int, int] = (
            {} if neighbours is None else neighbours.tell(self.nbytes)
        )  # of others': rank -> bytes
        self._files: dict[tuple[int, int], CopyFile] = {}  # by rank and slot
        self._rooms: dict[int, Array] = defaultdict(lambda: np.empty(PIECE, np.uint8))
        self._count = 0

    @property
    def room(self) -> int:
        """Bytes of shared memory that this rank's files take."""
        return SLOTS * (self.nbytes + sum(self.kept.values()))

    def save(self, progress: TrainingProgress, chain: str) -> None:
        """Copy the state as it is now. JobError on all ranks where one has no room.

        chain: the head of the chain over the run's records, as rank 0 knows it.
        """
        self._tick(f"copying step {progress.step} into memory")
        chain, slot = self._comm.broadcast_object(chain), self._count % SLOTS
        record = together(self._comm, partial(self._write, slot, progress, chain))
        if self._neighbours is not None:
            told = self._neighbours.tell(record)
            self._exchange(self._neighbours, slot)
            together(self._comm, partial(self._seal, slot, told))
        self._count += 1

    def _write(self, slot: int, progress: TrainingProgress, chain: str) -> bytes:
        """Write this rank's own slices, and make room for others'. Returns the record."""
        with writing():
            own = self._file(self._comm.rank, slot, self.nbytes)
            for rank, nbytes in self.kept.items():
                self._file(rank, slot, nbytes).begin()
            own.begin()
            total, at = xxh3_128(), 0
            for _, values in runs_of(self._optimizer, self._description):
                own.write(values, at)
                total.update(memoryview(values).cast("B"))
                at += values.nbytes
            about = self._description.machine, self._description.plan
            whose = self._place.job, self._comm.rank, self._comm.size
            record = CopyRecord(*whose, progress, chain, total.hexdigest(), self._runs, *about).packed()
            own.seal(record)
        return record

    def _exchange(self, neighbours: Neighbours, slot: int) -> None:
        """Hand the own elements over, and take those that are kept here, piece by piece."""
        me = self._comm.rank
        for at in range(0, max([self.nbytes, *self.kept.values()]), PIECE):
            own = self._rooms[me][: max(0, min(PIECE, self.nbytes - at))]
            self._files[me, slot].read(own, at)
            rooms = {
                rank: self._rooms[rank][: max(0, min(PIECE, nbytes - at))]
                for rank, nbytes in self.kept.items()
            }
            neighbours.hand_over(own, rooms)
            self._tick(f"copied {at + PIECE} bytes to another host")
            for rank, room in rooms.items():
                self._files[rank, slot].write(room, at)

    def _seal(self, slot: int, records: Mapping[int, bytes]) -> None:
        with writing():
            for rank, record in records.items():
                self._files[rank, slot].seal(record)

    def _file(self, rank: int, slot: int, nbytes: int) -> CopyFile:
        if (rank, slot) not in self._files:
            self._files[rank, slot] = CopyFile(self._place.path(rank, slot), nbytes)
        return self._files[rank, slot]

    def remove_others(self) -> None:
        """Remove what other jobs of this run have left on the hosts of this one."""
        remove(self._place.run, (self._place.job, ""), self._place.folder)
        self._comm.barrier()

    def remove(self) -> None:
        """Remove all copies of this run on these hosts: what they were for is over."""
        self._comm.barrier()
        remove(self._place.run, folder=self._place.folder)
        self.close()

    def close(self) -> None:
        """Give up what was opened; files stay."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._neighbours is not None:
            self._neighbours.close()


def runs_of(optimizer: ShardedAdamW, description: Description) -> Iterator[tuple[Run, Array]]:
    """This rank's slices of all that a checkpoint holds, on the host: runs of tensors, and their elements."""
    rank = optimizer.module.comm.rank
    for role, parts in parts_of(optimizer, description).items():
        for part in parts:
            values = part.on_host(slice(None))
            for name, offset, run in part.runs(part.partition.bounds[rank], values):
                yield (role, name, offset, int(run.size)), run
