"""The sharded state from outside: read, write, measure and bring together what the ranks hold.

All access is by parameter name and full shape, so it does not depend on strategy or number of ranks. Methods
marked "collective" must be called on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import array, came, instance, same_names, whole
from zero_mpi.comm import Comm
from zero_mpi.comm.agree import agreed
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Param
from zero_mpi.sharding.block_parameters import BlockParameters, ReadBytes
from zero_mpi.sharding.init_weights import initial_values
from zero_mpi.sharding.loss_scale import LossScale
from zero_mpi.sharding.sharded_unit import ShardedUnit
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.unit import ShardInfo, shard_infos

Read = Callable[[str, int, int], Array]  # (name, start, stop) -> those elements of the flattened parameter


class Unmatched(NamedTuple):
    """Names that did not match: missing ones of the module, and unexpected ones of the state."""

    missing: list[str]
    unexpected: list[str]


class ShardedState:
    """Access to the parameters and gradients that a list of units holds on this rank."""

    by_rows = False  # whether ranks own whole rows of each parameter
    _trains = True

    def __init__(
        self,
        params: Mapping[str, Param],
        units: list[ShardedUnit],
        comm: Comm,
        strategy: Strategy,
        owners: Comm | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.params, self.units, self._comm, self._strategy = params, units, comm, strategy
        self.owners = comm if owners is None else owners  # the ranks that the slices are dealt out to
        self.loss_scale = loss_scale or LossScale()
        self.unfilled = set(params)  # parameters that are zeros because nothing has given them values
        self._home = {name: unit for unit in units for name in unit.unit.params}

    @property
    def comm(self) -> Comm:
        """The communicator that the module was made on."""
        return self._comm

    @property
    def strategy(self) -> Strategy:
        """The sharding strategy."""
        return self._strategy

    # -------------------------------------------------------------------------------------------- mode

    @property
    def is_training(self) -> bool:
        """Return whether `forward` keeps what backward needs where its caller does not say; True at first."""
        return self._trains

    def train(self, mode: bool = True) -> Self:
        """Let `forward` keep what backward needs, or nothing if `mode` is False. Returns the module.

        No layer computes otherwise for it. Call it on all ranks; raises ValueError for no bool.
        """
        instance("train: mode", mode, bool, "True or False")
        self._trains = mode
        return self

    def eval(self) -> Self:
        """Let `forward` keep nothing: for outputs alone. `GradAccum` trains all the same."""
        return self.train(False)

    # ------------------------------------------------------------------------------------------- write

    def initialize(self, seed: int, names: Collection[str] | None = None) -> None:
        """Fill parameters, or those of `names`, by (seed, name): the same at any number of ranks. Collective.

        Raises ValueError for a seed that is no integer, and UsageError where ranks have different ones,
        unless each keeps all parameters: then `DDP.broadcast_parameters` may follow.
        """

        def look() -> tuple[int, dict[str, object]]:
            number = whole("initialize: seed", seed)
            return number, {"seed": number if self.strategy.shards_moments else "of each rank"}

        seed = agreed(self.comm, "initialize", look)

        def draw(name: str, start: int, stop: int) -> Array:
            return initial_values(name, self.params[name], seed, start, stop)

        self.load_slices(draw, names)

    def load_slices(self, read: Read, names: Collection[str] | None = None) -> None:
        """Fill parameters by read(name, start, stop); only what this rank keeps is asked for.

        If `names` are given, only these are filled: the others stay as they are. Collective where ranks share
        parameters and have used them.
        """
        self.drop_gathered()
        try:
            for unit in self.units:
                if names is None or not unit.unit.params.keys().isdisjoint(names):
                    for target, part in unit.parameters.filled:
                        fill(unit, target, part, read, names)
            self.unfilled.difference_update(self.params if names is None else names)
        finally:  # a rank that cannot read must not leave the others waiting
            self.owners.signal_written()

    def load_stored(self, read: ReadBytes) -> None:
        """Fill what is kept in the blocks of a file by read(name, start, out); see `load_slices`.

        `read` fills out, (bytes,) uint8, with the stored bytes of a tensor from `start` on.
        """
        self.drop_gathered()
        try:
            for unit in self.units:
                if isinstance(unit.parameters, BlockParameters):
                    unit.parameters.load(read)
                    self.unfilled.difference_update(unit.unit.params)
        finally:
            self.owners.signal_written()

    def drop_gathered(self) -> None:
        """Give up what was gathered from slices that are about to change.

        Where ranks share parameters it returns when none reads them any more. Before an update none does: a
        rank gives its part of the norm after its last use of any unit, and nobody has the norm before all
        have given theirs. Whatever else writes (loading, `update_shards`) may follow on uses without a norm
        between, such as an evaluation; then the ranks meet here. They agree on whether to: all wait for the
        same gathers, also one that has nothing to compute.
        """
        for unit in self.units:
            unit.release()
            unit.parameters.wait_update()
        if any(unit.parameters.in_use for unit in self.units):
            self.owners.barrier_readers()
            self._all_met()

    def _all_met(self) -> None:
        """Note that no rank uses parameters now, and that all know it."""
        for unit in self.units:
            unit.parameters.in_use = False

    def load_state_dict(self, state: Mapping[str, Array], strict: bool = True) -> Unmatched:
        """Fill parameters from whole arrays by name. Collective where ranks share parameters and used them.

        If not `strict`, parameters missing in `state` keep their values and unknown names are ignored. The
        names of both are returned, none if strict. Raises ValueError for wrong names if strict, and for wrong
        shapes or types.
        """
        instance("load_state_dict", state, Mapping, "a mapping of names to arrays")
        if strict:
            same_names("load_state_dict: the state does not fit the model", state, self.params)
        found = [name for name in self.params if name in state]
        for name in found:
            array(f"load_state_dict: {name}", state[name], self.params[name].shape)
        self.load_slices(lambda name, start, stop: state[name].reshape(-1)[start:stop], found)
        missing = [name for name in self.params if name not in state]
        return Unmatched(missing, [name for name in state if name not in self.params])

    def update_shards(self, flat: Array) -> None:
        """Set this rank's slices, one after the other in the order of `parameters`, from one flat array.

        Raises ValueError if `flat` has another size. Collective where ranks keep the whole.
        """
        shards = self.parameters()
        wanted = sum(int(shard.size) for shard in shards)
        array("update_shards", flat)
        if flat.ndim != 1 or flat.size != wanted:
            raise ValueError(
                f"update_shards: expected a flat array of {wanted} elements, the shard of rank "
                f"{self.comm.rank}, got shape {tuple(flat.shape)}"
            )
        self.drop_gathered()
        start = 0
        for shard in shards:
            device.in_use().copy(shard, flat[start : start + shard.size])
            start += shard.size
        self.broadcast_updated_params()

    def broadcast_updated_params(self) -> None:
        """Bring what was written into `parameters` to all ranks, in low precision rounded. Collective.

        The next forward waits for each unit where it needs it. `ShardedAdamW.step` does as much.
        """
        self.drop_gathered()
        self.unfilled.clear()
        for unit in self.units:
            unit.parameters.publish()
        self.owners.signal_written()

    # -------------------------------------------------------------------------------------------- read

    def parameters(self) -> list[Array]:
        """Return this rank's slice of each unit, flat, padding included: writing to them changes the model.

        A writer calls `drop_gathered` before and `broadcast_updated_params` after it, on all ranks.
        """
        return [unit.parameters.shard for unit in self.units]

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, this rank's elements of that parameter as a flat view), for what it owns any of."""
        for unit in self.units:
            for segment in unit.unit.segments(unit.parameters.elements):
                yield segment.name, unit.parameters.shard[segment.where]

    def shard_info(self) -> dict[str, ShardInfo]:
        """Return name -> which elements, or under row sharding rows, this rank owns, in the model's order."""
        owned = [(unit.unit, unit.parameters.elements) for unit in self.units]
        infos = {name: info for unit, part in owned for name, info in shard_infos(unit, part)}
        return {name: infos[name].in_rows() if self.by_rows else infos[name] for name in self.params}

    def all_gather_param(self, name: str) -> Array:
        """Return a copy of one full parameter, on every rank. Collective.

        Raises ValueError for unknown names.
        """
        if not isinstance(name, str) or name not in self._home:
            raise ValueError(
                f"parameter {came(name)} is not known; names are like {', '.join(list(self.params)[:3])}"
            )
        return self._home[name].parameters.copy_of(name)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of whole parameters by name, on every rank. Collective; memory of the whole model."""
        return {name: self.all_gather_param(name) for name in self.params}

    # ----------------------------------------------------------------------------------------- measure

    @property
    def shard_memory_bytes(self) -> int:
        """Bytes of parameters that this rank keeps between steps."""
        return sum(unit.parameters.nbytes for unit in self.units)

    @property
    def replicated_memory_bytes(self) -> int:
        """Bytes of parameters that a rank would keep without sharding."""
        return sum(unit.parameters.nbytes_whole for unit in self.units)

    @cached_property
    def _chunks(self) -> tuple[int, list[list[tuple[slice, slice]]]]:
        """The number of chunks that the norm is summed over, and where each unit's runs of chunks go."""
        first, end = {}, 0
        for name in self.params:
            unit = self._home[name].unit
            first[name] = end
            end += unit.chunks(name) if unit.trainable else 0
        places = []
        for sharded in self.units:
            unit, quantum = sharded.unit, sharded.unit.quantum
            of_each = [first[name] + np.arange(unit.chunks(name) * unit.trainable) for name in unit.params]
            mine = np.concatenate(of_each)[sharded.part.start // quantum : -(-sharded.part.stop // quantum)]
            cuts = [0, *(np.flatnonzero(np.diff(mine) != 1) + 1), mine.size]
            runs = [(slice(mine[a], mine[a] + b - a), slice(a, b)) for a, b in pairwise(cuts) if a < b]
            places.append(runs)
        return end, places

    def gradient_norm(self) -> float:
        """Return the Euclidean norm of the whole summed gradient, the same bits on every rank. Collective.

        It is that of the gradient itself, though `gradients` are those of the loss times `loss_scale.factor`.

        Sums of squares over fixed chunks of each parameter, brought together in the model's order and added
        in that order: neither ranks nor units nor strategy move a bit. What is tied counts once.
        """
        count, chunks = self._chunks
        sums, places, squares = np.zeros(count), [], []
        for unit, of_unit in zip(self.units, chunks, strict=True):
            unit.wait_reduce()
            if unit.unit.trainable and unit.gradient.sum.size:
                places.append(of_unit)
                squares.append(ops.chunk_squares(unit.gradient.sum, unit.unit.quantum))
        for runs, found in zip(places, device.in_use().all_to_host(squares), strict=True):
            for there, here in runs:
                sums[there] = found[here]
        total = self.owners.sum_vector(sums)
        if count:  # no rank has the sum before all have come here
            self._all_met()
        return float(np.sqrt(total.sum())) / self.loss_scale.factor


def fill(
    unit: ShardedUnit, target: Array, part: slice, read: Read, names: Collection[str] | None = None
) -> None:
    """Write read(name, start, stop) into `target`, which is `part` of the unit; of `names`, if given."""
    for segment in unit.unit.segments(part):
        if names is not None and segment.name not in names:
            continue
        size = segment.where.stop - segment.where.start
        values = read(segment.name, segment.offset, segment.offset + size)
        device.in_use().copy(target[segment.where], values)
