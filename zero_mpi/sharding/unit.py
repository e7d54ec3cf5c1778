"""A unit: parameters that are sent together, laid out in one flat buffer.

Each parameter starts at a multiple of the quantum (1024 elements, or one row under row sharding), so that the
fixed chunks over which norms are summed do not depend on the unit. The gaps are zeros and stay zeros.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from zero_mpi.comm.partition import Partition, dealt_out
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Param, Stage
from zero_mpi.ops.block_kinds import BlockKind
from zero_mpi.sharding.precision import floats

QUANTUM = 1024  # elements
# Kinds of units. All parameters of a unit have the same kind; stored parameters are frozen.
TRAINED, FULL, FROZEN, STORED = "trained", "full", "frozen", "stored"
BYTES = 4  # bytes of an element
WORDS = 16  # words in a cache line of 64 bytes; stored tensors and slices start at multiples of it

Stored = Mapping[str, BlockKind]


@dataclass(frozen=True)
class Segment:
    """A run of one parameter's elements in a slice: `where` in the slice, `offset` in the parameter."""

    name: str
    where: slice
    offset: int


@dataclass(frozen=True)
class Unit:
    """Names, shapes and offsets of the parameters in a flat buffer.

    full_matrices: no parameter is cut; ends: where each rank's slice ends in that case (`with_owners`).
    firsts: offset of the unit's part in each parameter that is split over several units.
    """

    name: str
    params: Mapping[str, Param]
    quantum: int
    trainable: bool
    full_matrices: bool = False
    ends: tuple[int, ...] = ()
    firsts: Mapping[str, int] = field(default_factory=dict)

    def label(self, name: str) -> str:
        """Return the name of a parameter, with the part of it that the unit holds: NAME[8:16]."""
        if name not in self.firsts:
            return name
        param = self.params[name]
        first = self.firsts[name] * param.shape[0] // param.size
        return f"{name}[{first}:{first + param.shape[0]}]"

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset of each parameter, a multiple of the quantum."""
        starts = accumulate((self.chunks(name) * self.quantum for name in self.params), initial=0)
        return dict(zip(self.params, starts, strict=False))

    @cached_property
    def length(self) -> int:
        """Number of elements of the buffer, gaps included."""
        return sum(self.chunks(name) for name in self.params) * self.quantum

    def chunks(self, name: str) -> int:
        """Return the number of quanta that the parameter occupies."""
        return -(-self.params[name].size // self.quantum)

    def partition(self, ranks: int) -> Partition:
        return dealt_out(self.length, ranks, self.quantum, self.ends)

    def gathered_size(self, compute: Any) -> int:
        """Return the length of the buffer for gathered parameters of type `compute`, in float32 elements."""
        return floats(self.length, compute)

    def unpacked_size(self, compute: Any) -> int:
        """Return the length of the buffer for unpacked parameters, in float32 elements; 0 without one."""
        return 0

    def gathered_split(self, ranks: int, compute: Any) -> Partition:
        size, quantum = self.gathered_size(compute), floats(self.quantum, compute)
        return dealt_out(size, ranks, quantum, tuple(floats(end, compute) for end in self.ends))

    def kept_bytes(self, compute: Any) -> int:
        """Return the bytes per element of a slice."""
        return int(compute.itemsize)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return name -> view, in full shape, of the full flat buffer."""
        return {
            name: flat[self.offsets[name] : self.offsets[name] + param.size].reshape(param.shape)
            for name, param in self.params.items()
        }

    def segments(self, part: slice) -> list[Segment]:
        """Return the runs of parameters in the slice `part` of the buffer, in order; gaps are left out."""
        segments = []
        for name, param in self.params.items():
            first = max(self.offsets[name], part.start)
            last = min(self.offsets[name] + param.size, part.stop)
            if first < last:
                span = slice(first - part.start, last - part.start)
                offset = first - self.offsets[name] + self.firsts.get(name, 0)
                segments.append(Segment(name, span, offset))
        return segments


KINDS = {  # (end of the unit's name, whether the unit is trained, whether it cuts no parameter)
    TRAINED: ("", True, False),
    FULL: (" (whole)", True, True),
    FROZEN: (" (frozen)", False, False),
    STORED: (" (stored stacks)", False, False),
}


def by_scope(stages: Iterable[Stage], params: Mapping[str, Param]) -> dict[str, list[str]]:
    """Return the names of `params` by the scope that uses them first, in the model's order."""
    members: dict[str, list[str]] = {}
    seen = set[str]()
    for stage in stages:
        names = [name for name in stage.layer.params() if name in params and name not in seen]
        seen.update(names)
        members.setdefault(stage.scope, []).extend(names)
    return members


def units_by_scope(
    stages: Iterable[Stage], params: Mapping[str, Param], kind_of: Callable[[str], str]
) -> list[Unit]:
    """Return one unit per scope, in the model's order, and other units for frozen or unsplit parameters."""
    units = []
    for scope, names in by_scope(stages, params).items():
        for kind, (end, trainable, full) in KINDS.items():
            members = {name: params[name] for name in names if kind_of(name) == kind}
            if members:
                units.append(Unit(scope + end, members, QUANTUM, trainable, full))
    return units


def units_by_row(
    stages: Iterable[Stage], params: Mapping[str, Param], kind_of: Callable[[str], str]
) -> list[Unit]:
    """Return one unit per parameter, whose shards are full rows; a vector's rows are its elements."""
    return [
        Unit(name, {name: params[name]}, params[name].size // params[name].shape[0], kind_of(name) == TRAINED)
        for names in by_scope(stages, params).values()
        for name in names
    ]


def units_by_bytes(
    params: Mapping[str, Param], kind_of: Callable[[str], str], bucket_bytes: int
) -> list[Unit]:
    """Return buckets of up to `bucket_bytes`, filled from the last parameter on, in the order of backward.

    A larger parameter has a separate bucket. Frozen parameters form one unit, which is never sent.
    """
    full: list[tuple[str, dict[str, Param]]] = []
    open_buckets: dict[str, dict[str, Param]] = {}
    for name in reversed([name for name in params if kind_of(name) != FROZEN]):
        bucket = open_buckets.setdefault(kind_of(name), {})
        if bucket and (sum(p.size for p in bucket.values()) + params[name].size) * BYTES > bucket_bytes:
            full.append((kind_of(name), bucket))
            bucket = open_buckets[kind_of(name)] = {}
        bucket[name] = params[name]
    full += [(kind, bucket) for kind, bucket in open_buckets.items() if bucket]
    units = [
        Unit(f"bucket {number}", members, QUANTUM, True, kind == FULL)
        for number, (kind, members) in enumerate(full)
    ]
    frozen = {name: param for name, param in params.items() if kind_of(name) == FROZEN}
    return [*units, Unit("frozen", frozen, QUANTUM, False)] if frozen else units


def with_owners(units: Sequence[Unit], ranks: int, cost: Callable[[tuple[int, ...]], int]) -> list[Unit]:
    """Return the units for `ranks` ranks; in units of full matrices, each parameter has one owner.

    Over all units, the parameter of largest `cost` is assigned first, to the rank with the least cost so far.
    """
    full = [unit for unit in units if unit.full_matrices]
    costs = {unit.label(name): cost(param.shape) for unit in full for name, param in unit.params.items()}
    load, owner = [0] * ranks, dict[str, int]()
    for label in sorted(costs, key=costs.__getitem__, reverse=True):
        owner[label] = rank = load.index(min(load))
        load[rank] += costs[label]

    def dealt(unit: Unit) -> Unit:
        owners = {name: owner[unit.label(name)] for name in unit.params}
        sizes = [0] * ranks
        for name, rank in owners.items():
            sizes[rank] += unit.chunks(name) * unit.quantum
        params = {name: unit.params[name] for name in sorted(owners, key=owners.__getitem__)}
        return replace(unit, params=params, ends=tuple(accumulate(sizes)))

    return [dealt(unit) if unit.full_matrices else unit for unit in units]


@dataclass(frozen=True)
class BlockUnit(Unit):
    """A frozen unit whose parameters are kept and gathered as quantized blocks.

    The bytes are only copied, so they may be cut anywhere: transports see them as float32 words, in a
    separate unit (`words`). Layers read arrays unpacked from them; for stacked matrices (`stacks`) layers
    read the bytes, and unpack only the matrices that they use.
    """

    kinds: Stored = field(default_factory=dict)
    stacks: bool = False

    @cached_property
    def words(self) -> Unit:
        """Unit of the stored bytes, in which each tensor's bytes are seen as float32 words."""
        runs = {name: Param((-(-self.nbytes(name) // BYTES),), "zeros") for name in self.params}
        return Unit(self.name, runs, WORDS, False)

    def nbytes(self, name: str) -> int:
        return self.kinds[name].bytes_of(self.params[name].size)

    def gathered_size(self, compute: Any) -> int:
        return self.words.length

    def unpacked_size(self, compute: Any) -> int:
        return 0 if self.stacks else floats(self.length, compute)

    def partition(self, ranks: int) -> Partition:
        return self.words.partition(ranks)

    def gathered_split(self, ranks: int, compute: Any) -> Partition:
        return self.partition(ranks)

    def kept_bytes(self, compute: Any) -> int:
        return BYTES


def block_units(stages: Iterable[Stage], params: Mapping[str, Param], stored: Stored) -> list[BlockUnit]:
    """Return the units of the stored parameters, by scope even if other units are cut by bytes.

    A scope has one unit that is unpacked as a whole, and one unit of stacked matrices.
    """
    units = []
    for scope, names in by_scope(stages, {name: params[name] for name in params if name in stored}).items():
        for end, stacks in ((" (stored)", False), (KINDS[STORED][0], True)):
            members = {name: params[name] for name in names if (len(params[name].shape) > 2) is stacks}
            kinds = {name: stored[name] for name in members}
            if members:
                units.append(BlockUnit(scope + end, members, QUANTUM, False, kinds=kinds, stacks=stacks))
    return units


def part_units(
    scope: str, stacked: Mapping[str, Param], kind_of: Callable[[str], str], stored: Stored, limit: int
) -> list[tuple[slice, list[Unit]]]:
    """Return parts of stacked parameters and their units, one per kind; [] if no parameter is split.

    A part has as many entries of the first dimension as fit in `limit` bytes, at least 1. Parameters whose
    parts would begin inside a chunk of the norm are not split.
    """
    count = next(iter(stacked.values())).shape[0]
    rows = {name: replace(param, shape=(1, *param.shape[1:])) for name, param in stacked.items()}
    sizes = (stored[name].bytes_of(p.size) if name in stored else p.size * BYTES for name, p in rows.items())
    step = max(1, limit // sum(sizes))
    names = [name for name in rows if name in stored or rows[name].size * step % QUANTUM == 0]
    if step >= count or not names:
        return []

    def cut(first: int, last: int, kind: str) -> Unit:
        members = [name for name in names if kind == (STORED if name in stored else kind_of(name))]
        params = {name: replace(rows[name], shape=(last - first, *rows[name].shape[1:])) for name in members}
        firsts = {name: first * rows[name].size for name in members}
        end, trainable, full = KINDS[kind]
        unit = Unit(f"{scope} [{first}:{last}]{end}", params, QUANTUM, trainable, full, firsts=firsts)
        blocks = {name: stored[name] for name in members if name in stored}
        return BlockUnit(**vars(unit), kinds=blocks, stacks=True) if blocks else unit

    bounds = [(first, min(first + step, count)) for first in range(0, count, step)]
    return [(slice(*each), [unit for kind in KINDS if (unit := cut(*each, kind)).params]) for each in bounds]
