"""What copies in shared memory a run can go on from, and going on from them, on any ranks and hosts.

Each host says what it has. The newest step counts of which the slices of all ranks that wrote it are there,
whole, on any host: at home or with a keeper. Slices are runs of tensors, so it does not matter how many ranks
take them up: each slice is broadcast by a rank of a host that has it, and everybody takes out what it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from zero_mpi import device
from zero_mpi.checkpoint.copy_file import NAME, PIECE, RECORD, check_elements, ours, pieces
from zero_mpi.checkpoint.copy_record import ELEMENT, CopyRecord, Run, elements_of, look
from zero_mpi.checkpoint.shards import FIRST, SECOND
from zero_mpi.checkpoint.sound import AVERAGE, MODEL
from zero_mpi.checkpoint.state import STATE, Description, TrainingProgress, take_up
from zero_mpi.comm import Comm
from zero_mpi.comm.agree import together
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.sharding.loss_scale import LossScale
from zero_mpi.sharding.optimizer import ShardedAdamW
from zero_mpi.sharding.sharded_unit import ShardedUnit

Key = tuple[int, str, str]  # step, job, and the slot of its copies
Targets = dict[tuple[str, str], list[tuple[int, Array]]]  # role and tensor -> (first element, room)


@dataclass(frozen=True)
class Offer:
    """A copy that a rank has found on its host."""

    path: Path
    record: CopyRecord

    @property
    def key(self) -> Key:
        """What copies belong together by."""
        return self.record.progress.step, self.record.job, self.path.name[-1]


@dataclass(frozen=True)
class FoundCopies:
    """Whole copies of one step: for each rank that wrote it who has its slice, and this rank's own offers."""

    key: Key
    record: CopyRecord
    holders: tuple[int, ...]
    here: Mapping[int, Offer]

    @property
    def progress(self) -> TrainingProgress:
        """Where the run stood."""
        return self.record.progress


def find_copies(
    comm: Comm,
    run: str,
    share: tuple[int, int],
    folder: Path,
    is_known: Callable[[CopyRecord], str],
    faults: list[str],
) -> FoundCopies | None:
    """The newest whole copies of a run, the same on all ranks; None where there are none. Collective.

    share     (number of this rank on its host, ranks there): they look at its files together
    is_known  asked on rank 0: why a copy is not of the run in the folder, or an empty text
    faults    is told what was passed over
    """
    number, count = share
    offers, told = look_around(run, number, count, folder)
    for more in comm.allgather_object(told):
        faults += more
    keys = comm.allgather_object([(offer.key, offer.record.rank, offer.record.ranks) for offer in offers])
    whole: dict[Key, set[int]] = defaultdict(set)
    ranks_of = {key: ranks for one in keys for key, _, ranks in one}
    for one in keys:
        for key, rank, _ in one:
            whole[key].add(rank)
    for key in sorted(whole, reverse=True):
        if len(whole[key]) == ranks_of[key]:
            mine = [offer for offer in offers if offer.key == key]
            found = examine(comm, key, (mine, ranks_of[key]), is_known, faults)
            if found is not None:
                return found
    return None


def look_around(run: str, number: int, count: int, folder: Path) -> tuple[list[Offer], list[str]]:
    """This rank's share of the copies of its host, and what is wrong with others."""
    offers, faults = [], []
    records = [path for path in ours(run, folder) if path.name.endswith(RECORD)]
    for path in records[number::count]:
        try:
            record, match = look(path), NAME.fullmatch(path.name)
            if match is None or (match[2], match[3]) != (record.job, str(record.rank)):
                raise UsageError(f"{path}: speaks of another copy")
            offers.append(Offer(elements_of(path), record))
        except UsageError as error:
            faults.append(str(error))
    return offers, faults


def examine(
    comm: Comm,
    key: Key,
    offered: tuple[Sequence[Offer], int],
    is_known: Callable[[CopyRecord], str],
    faults: list[str],
) -> FoundCopies | None:
    """The copies of one step, if all of them are whole and of the run in the folder. Collective.

    offered: by this rank, and how many ranks wrote them
    """
    mine, ranks = offered
    first = next((offer.record for offer in mine), None)
    record = next(record for record in comm.allgather_object(first) if record is not None)
    problem = comm.broadcast_object(is_known(record) if comm.rank == 0 else "")
    if problem:
        faults.append(problem)
        return None
    here, bad = {}, []
    for offer in mine:
        try:
            check_elements(offer.path, offer.record.nbytes, offer.record.digest)
            here[offer.record.rank] = offer
        except UsageError as error:
            bad.append(str(error))
    told = comm.allgather_object((sorted(here), bad))
    faults += [text for _, texts in told for text in texts]
    holders = [
        next((holder for holder, (held, _) in enumerate(told) if rank in held), None) for rank in range(ranks)
    ]
    if None in holders:
        return None
    return FoundCopies(key, record, tuple(holder for holder in holders if holder is not None), here)


def load_copies(
    comm: Comm, found: FoundCopies, optimizer: ShardedAdamW, description: Description
) -> TrainingProgress:
    """Fill parameters, moments and averages; each rank its own slices. Returns where the run stood.

    Collective; raises UsageError on all ranks where something is missing.
    """
    optimizer.module.drop_gathered()
    targets = targets_of(optimizer, description)
    wanted = sum(int(room.size) for rooms in targets.values() for _, room in rooms)
    filled = 0
    for rank, holder in enumerate(found.holders):
        offer = found.here[rank] if holder == comm.rank else None
        filled += take(comm, holder, offer, targets)
    optimizer.module.owners.signal_written()
    together(comm, partial(check_filled, filled, wanted))
    optimizer.module.unfilled.clear()
    scale = optimizer.module.loss_scale
    scale.exponent, scale.good_steps = LossScale.start(scale.dynamic).exponent, 0
    return take_up(found.progress, optimizer)


def check_filled(filled: int, wanted: int) -> None:
    """Raise UsageError unless the copies had all that is needed."""
    if filled != wanted:
        raise UsageError(
            f"the copies in memory hold {filled} of {wanted} elements: give --resume a checkpoint"
        )


def take(comm: Comm, holder: int, offer: Offer | None, targets: Targets) -> int:
    """Broadcast a rank's slices, and take out what is needed here; returns how many elements. Collective."""
    runs: Sequence[Run] = comm.broadcast_object(None if offer is None else offer.record.runs, holder)
    nbytes, filled = ELEMENT * sum(size for *_, size in runs), 0
    source = None if offer is None else pieces(offer.path, nbytes)
    room = np.empty(min(nbytes, PIECE), np.uint8)
    starts = np.cumsum([0, *(size for *_, size in runs)])
    for at in range(0, nbytes, PIECE):
        piece = room[: min(PIECE, nbytes - at)] if source is None else next(source)
        comm.broadcast(piece, holder, "copy").wait()
        values, begin = piece.view(np.float32), at // ELEMENT
        first = int(np.searchsorted(starts, begin, "right")) - 1
        for (role, name, offset, size), start in zip(runs[first:], starts[first:-1].tolist(), strict=True):
            if start >= begin + values.size:
                break
            low, high = max(start, begin), min(start + size, begin + values.size)
            part = values[low - begin : high - begin]
            filled += put(targets.get((role, name), []), offset + low - start, part)
    return filled


def put(rooms: Sequence[tuple[int, Array]], offset: int, values: Array) -> int:
    """Copy elements of a tensor, from `offset` on, to where they are needed. Returns how many that were."""
    filled = 0
    for start, room in rooms:
        low, high = max(start, offset), min(start + int(room.size), offset + int(values.size))
        if low < high:
            device.in_use().copy(room[low - start : high - start], values[low - offset : high - offset])
            filled += high - low
    return filled


def targets_of(optimizer: ShardedAdamW, description: Description) -> Targets:
    """Where this rank keeps what a checkpoint holds."""
    targets: Targets = defaultdict(list)
    for unit in optimizer.units if description.is_adapter else optimizer.module.units:
        for room, part in unit.parameters.filled:
            place(targets, (MODEL, ""), unit, room, part)
    for unit in optimizer.units:
        part, moments = unit.updated[2], optimizer.moments[unit.name]
        place(targets, (STATE, FIRST), unit, moments.first, part)
        place(targets, (STATE, SECOND), unit, moments.second, part)
        if optimizer.average is not None:
            place(targets, (AVERAGE, ""), unit, optimizer.average.values[unit.name], part)
    return targets


def place(targets: Targets, what: tuple[str, str], unit: ShardedUnit, room: Array, part: slice) -> None:
    """Note where `part` of a unit's tensors lies; what: the role of the file, and how its names begin."""
    role, prefix = what
    for segment in unit.unit.segments(part):
        targets[role, prefix + segment.name].append((segment.offset, room[segment.where]))


def texts(faults: Sequence[str]) -> Iterator[str]:
    """Notes on what was passed over."""
    yield from (f"passed over a copy in memory that cannot be used: {fault}" for fault in faults)
