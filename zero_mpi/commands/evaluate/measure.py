"""Evaluation of a model over sequences: its parameters sharded over all ranks, its losses on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from zero_mpi import device
from zero_mpi.arguments import UNCOUNTED
from zero_mpi.checkpoint.state import finite
from zero_mpi.commands.evaluate.candidate import Candidate
from zero_mpi.commands.evaluate.choices import EncodedChoices
from zero_mpi.commands.evaluate.quantization import Importance, divergences
from zero_mpi.config.settings import Config
from zero_mpi.data import EvalLoader, Windows
from zero_mpi.data.packing import PackedWindows
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.nn.linear import observing
from zero_mpi.sharding import ShardedModule, strategy_named
from zero_mpi.sharding.evaluation import PartedBatch, part_losses
from zero_mpi.sharding.precision import precision_named
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import watched
from zero_mpi.train.transport import choose_transport


class SequenceSet(Protocol):
    """Rows of tokens of which some targets count; micro-batch i is the same on any rank."""

    count: int  # losses
    micro_batches: int

    def micro(self, i: int) -> PartedBatch:
        """Return micro-batch i, from 0."""


class WindowSet:
    """Windows over a text, or conversations: a loss for each, of all the tokens that it predicts first.

    A window has `context` inputs; each predicts the token after it. Where windows overlap, only those targets
    count that no window before has predicted: the last `stride`, and all of the first window's.
    """

    def __init__(self, windows: Windows | PackedWindows, micro_batch: int, most: int | None = None) -> None:
        self._windows, self._loader = windows, EvalLoader(windows, micro_batch, most)
        self.count, self.micro_batches = len(self._loader.chosen), self._loader.micro_batches

    def micro(self, i: int) -> PartedBatch:
        """Return micro-batch i: a part for each window."""
        first = i * self._loader.micro_batch
        batch = self._loader.micro(i)
        numbers = self._loader.chosen[first : first + len(batch.inputs)].tolist()
        parts = [(row, slice(self._windows.known(number), None)) for row, number in enumerate(numbers)]
        return PartedBatch(batch.inputs, batch.targets, parts, first)


class AnswerSet:
    """Answers behind their questions: a loss for each answer, of its tokens alone.

    Shorter sequences of a micro-batch are padded at their ends, which no earlier position sees.
    """

    def __init__(self, choices: EncodedChoices, micro_batch: int, scale: float = 1.0) -> None:
        self._choices, self._micro_batch, self._scale = choices, micro_batch, scale
        self.count = len(choices.sequences)
        self.micro_batches = -(-self.count // micro_batch)

    def micro(self, i: int) -> PartedBatch:
        """Return micro-batch i: a part for each answer."""
        here = slice(i * self._micro_batch, (i + 1) * self._micro_batch)
        rows, starts = self._choices.sequences[here], self._choices.starts[here]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
        parts = [
            (place, slice(start - 1, len(row) - 1))
            for place, (row, start) in enumerate(zip(rows, starts, strict=True))
        ]
        x, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        return PartedBatch(x, targets, parts, here.start, self._scale)


def counted(sequences: SequenceSet, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each loss the sum of `values` (V,), by id, over the targets that count."""
    found: list[int] = []
    for batch in map(sequences.micro, range(sequences.micro_batches)):
        targets = [batch.targets[part] for part in batch.parts]
        found += [int(values[ids[ids != UNCOUNTED]].sum()) for ids in targets]
    return np.array(found, np.int64)


def grouped(values: Sequence[float], counts: Sequence[int]) -> list[list[float]]:
    """Return `values` in runs of `counts`: those of each question."""
    ends = np.cumsum(counts).tolist()
    return [list(values[end - count : end]) for end, count in zip(ends, counts, strict=True)]


@contextmanager
def opened_module(
    world: World, config: Config, candidate: Candidate, watchdog: Watchdog
) -> Iterator[ShardedModule]:
    """Yield a model over all ranks with its weights; nothing of it is kept. Collective; raises UsageError."""
    watchdog.beat(f"reading {candidate.name}")
    notes: list[str] = []
    comm = choose_transport(world, replace(config, init=candidate.path), candidate.model, notes).comm
    for note in notes if world.rank == 0 else ():
        log.tell(note)
    module = ShardedModule(
        candidate.model.stages(),
        comm,
        strategy_named(config.strategy),
        prefetch=config.stages_ahead(device.in_use().name == "cuda"),
        frozen=config.freeze,  # all parameters are frozen, so there are no gradient buffers
        precision=precision_named(config.precision),
    ).eval()
    read = finite(candidate.source.read, candidate.source.path)
    world.together(partial(module.load_slices, read))
    yield module
    del module  # freed before the memory that it lies in
    comm.close()


def measure(
    world: World,
    config: Config,
    candidate: Candidate,
    sets: Sequence[SequenceSet],
    watchdog: Watchdog,
    importance: Importance | None = None,
) -> list[Array]:
    """Return the losses of a model in nats, (count,) float64 for each set, on all ranks. Collective.

    Raises UsageError on all ranks for weights or losses that are not finite. `importance` sees the first set.
    """
    with opened_module(world, config, candidate, watchdog) as module:
        found = [
            take_through(module, sequences, candidate, watchdog, None if number else importance)
            for number, sequences in enumerate(sets)
        ]
        del module
    for losses in found:
        if not np.isfinite(losses).all():
            place = int(np.argmin(np.isfinite(losses)))
            raise UsageError(
                f"{shown(candidate.path)}: the loss of sequence {place} is {losses[place]}, expected a "
                f"number: its weights are damaged, or too large for --precision {config.precision}"
            )
    return found


def divergence(
    world: World, config: Config, candidates: Sequence[Candidate], windows: SequenceSet, watchdog: Watchdog
) -> Array:
    """Return `divergences` of two models over the windows. Collective."""

    def read(number: int) -> PartedBatch:
        watchdog.beat(f"micro-batch {number} of {windows.micro_batches} of both models")
        return windows.micro(number)

    model, base = candidates
    with (
        opened_module(world, config, model, watchdog) as ours,
        opened_module(world, config, base, watchdog) as theirs,
        np.errstate(all="ignore"),
    ):
        found = divergences([ours, theirs], windows.micro_batches, windows.count, read)
        del ours, theirs
    return found


def take_through(
    module: ShardedModule,
    sequences: SequenceSet,
    candidate: Candidate,
    watchdog: Watchdog,
    importance: Importance | None = None,
) -> Array:
    """Return the losses of one set; `importance` sees the inputs of matrices. Collective."""
    hidden = module.comm.rank > 0 or not watched()
    with tqdm(total=sequences.micro_batches, desc=candidate.name, leave=False, disable=hidden) as bar:

        def read(number: int) -> PartedBatch:
            watchdog.beat(f"micro-batch {number} of {sequences.micro_batches} of {candidate.name}")
            bar.update(min(module.comm.size, sequences.micro_batches - number))
            return sequences.micro(number)

        seen = nullcontext() if importance is None else observing(importance.observe)
        after = None if importance is None else importance.end_round
        with np.errstate(all="ignore"), seen:  # overflow is reported below
            losses: Any = part_losses(module, sequences.micro_batches, sequences.count, read, after)
    return losses
