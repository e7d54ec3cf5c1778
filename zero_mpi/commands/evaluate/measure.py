"""A model over the sequences: its parameters as slices on all ranks, its losses in one vector on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from zero_mpi import device
from zero_mpi.checkpoint.state import finite
from zero_mpi.comm import Comm
from zero_mpi.commands.evaluate.candidate import Candidate
from zero_mpi.commands.evaluate.sequences import SequenceSet
from zero_mpi.config.settings import Config
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.sharding import ShardedModule, strategy_named
from zero_mpi.sharding.evaluation import PartedBatch, part_losses
from zero_mpi.sharding.precision import precision_named
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import watched
from zero_mpi.train.transport import choose_transport


def measure(
    world: World, config: Config, candidate: Candidate, sets: Sequence[SequenceSet], watchdog: Watchdog
) -> list[Array]:
    """The losses of a model in nats, (count,) float64 for each set, the same on all ranks. Collective.

    Raises UsageError on all ranks for weights or losses that are not finite. Nothing of the model is kept.
    """
    watchdog.beat(f"reading {candidate.name}")
    notes: list[str] = []
    comm = choose_transport(world, replace(config, init=candidate.path), candidate.model, notes).comm
    for note in notes if world.rank == 0 else ():
        log.tell(note)
    module = make_module(config, candidate, comm)
    fill(world, module, candidate)
    found = [take_through(module, sequences, candidate, watchdog) for sequences in sets]
    del module  # before the memory that it lies in
    comm.close()
    for losses in found:
        check_finite(losses, candidate, config)
    return found


def fill(world: World, module: ShardedModule, candidate: Candidate) -> None:
    """Read this rank's slices; raises UsageError on all ranks. Collective."""
    world.together(lambda: module.load_slices(finite(candidate.source.read, candidate.source.path)))


def make_module(config: Config, candidate: Candidate, comm: Comm) -> ShardedModule:
    """The model as slices, all of it frozen: so there is no room for gradients."""
    return ShardedModule(
        candidate.model.stages(),
        comm,
        strategy_named(config.strategy),
        prefetch=config.stages_ahead(device.in_use().name == "cuda"),
        frozen=config.freeze,
        precision=precision_named(config.precision),
    ).eval()


def take_through(
    module: ShardedModule, sequences: SequenceSet, candidate: Candidate, watchdog: Watchdog
) -> Array:
    """The losses of one set. Collective."""
    hidden = module.comm.rank > 0 or not watched()
    with tqdm(total=sequences.micro_batches, desc=candidate.name, leave=False, disable=hidden) as bar:

        def read(number: int) -> PartedBatch:
            watchdog.beat(f"micro-batch {number} of {sequences.micro_batches} of {candidate.name}")
            bar.update(min(module.comm.size, sequences.micro_batches - number))
            return sequences.micro(number)

        with np.errstate(all="ignore"):  # what overflows is told below
            losses: Any = part_losses(module, sequences.micro_batches, sequences.count, read)
    return losses


def check_finite(losses: Array, candidate: Candidate, config: Config) -> None:
    """Raise UsageError for a loss that is none."""
    if not np.isfinite(losses).all():
        place = int(np.argmin(np.isfinite(losses)))
        raise UsageError(
            f"{shown(candidate.path)}: the loss of sequence {place} is {losses[place]}, expected a number: "
            f"its weights are damaged, or too large for --precision {config.precision}"
        )
