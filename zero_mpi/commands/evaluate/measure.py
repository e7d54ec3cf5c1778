"""Computes the losses of a model over sequences. Parameters are sharded; each rank gets all losses."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from zero_mpi import device
from zero_mpi.arguments import UNCOUNTED
from zero_mpi.checkpoint.state import finite
from zero_mpi.comm import Comm
from zero_mpi.comm.partition import dealt_out as partitioned
from zero_mpi.commands.evaluate.choices import EncodedChoices
from zero_mpi.commands.evaluate.task import Candidate
from zero_mpi.config.settings import Config
from zero_mpi.data import EvalLoader, Windows
from zero_mpi.data.packing import PackedWindows
from zero_mpi.data.teacher_file import HEAD, TeacherFile, begin
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError, writing
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import READ_AT_ONCE
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.nn.linear import observing
from zero_mpi.nn.loss import HeadLoss, PartLosses
from zero_mpi.ops.reference import chunk_rows
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.rounds import dealt_out, ordered_total, part_losses
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import watched
from zero_mpi.train.setup import choose_transport, layout_config

ROWS = 64  # rows of logits that are compared at a time
Inputs = tuple[Any, PartLosses, int]  # inputs; targets in parts; index of the micro-batch's first part
FIGURES = 3  # number of sums per window: divergence, squared changes of probability, equal top tokens


class WindowSet:
    """Windows of a text, or conversations. A window's loss is the sum of the losses of its counted targets.

    A window has `context` inputs, each of which predicts the next token. If windows overlap, a target counts
    only in the first window that predicts it, so in later windows only the last `stride` targets count.
    """

    def __init__(self, windows: Windows | PackedWindows, micro_batch: int, most: int | None = None) -> None:
        self._windows, self._loader = windows, EvalLoader(windows, micro_batch, most)
        self.count, self.micro_batches = len(self._loader.indices), self._loader.micro_batches

    def micro(self, i: int) -> Inputs:
        """Return micro-batch i, with one part per window."""
        first = i * self._loader.micro_batch
        batch = self._loader.micro(i)
        numbers = self._loader.indices[first : first + len(batch.inputs)].tolist()
        parts = [(row, slice(self._windows.overlap(number), None)) for row, number in enumerate(numbers)]
        return batch.inputs, PartLosses(batch.targets, parts), first

    def places(self, i: int) -> NDArray[np.int64]:
        """Return the text position of each counted target of micro-batch i, (b, T); -1 for all others."""
        (_, batch, _), positions = self.micro(i), self._windows.places(self._loader.batches()[i])
        mask = np.zeros(positions.shape, bool)
        for part in batch.parts:
            mask[part] = batch.targets[part] != UNCOUNTED
        return np.where(mask, positions, -1)


class AnswerSet:
    """Answers with their questions. Only the tokens of an answer count in its loss.

    A micro-batch pads its shorter sequences at the end. Earlier positions do not see the padding.
    """

    def __init__(self, choices: EncodedChoices, micro_batch: int, scale: float = 1.0) -> None:
        self._choices, self._micro_batch, self._scale = choices, micro_batch, scale
        self.count = len(choices.sequences)
        self.micro_batches = -(-self.count // micro_batch)

    def micro(self, i: int) -> Inputs:
        """Return micro-batch i, with one part per answer."""
        span = slice(i * self._micro_batch, (i + 1) * self._micro_batch)
        rows, starts = self._choices.sequences[span], self._choices.starts[span]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
        parts = [
            (place, slice(start - 1, len(row) - 1))
            for place, (row, start) in enumerate(zip(rows, starts, strict=True))
        ]
        x, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        return x, PartLosses(targets, parts, self._scale), span.start


def counted(windows: WindowSet, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each window's sum of values[id] over the ids that are its counted targets; `values`: (V,)."""
    sums: list[int] = []
    for _, batch, _ in map(windows.micro, range(windows.micro_batches)):
        targets = [batch.targets[part] for part in batch.parts]
        sums += [int(values[ids[ids != UNCOUNTED]].sum()) for ids in targets]
    return np.array(sums, np.int64)


def groups_of(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Split `values` into one list per question; `counts` has the lengths of the lists."""
    ends = np.cumsum(counts).tolist()
    return [list(values[end - count : end]) for end, count in zip(ends, counts, strict=True)]


@contextmanager
def opened_module(
    world: World, config: Config, subject: Candidate, watchdog: Watchdog
) -> Iterator[ShardedModule]:
    """Yield a sharded model with its weights, then free it. Raise UsageError for bad weights. Collective."""
    watchdog.beat(f"reading {subject.name}")
    notes: list[str] = []
    comm = choose_transport(world, replace(config, init=subject.path), subject.model, notes).comm
    for note in notes if world.rank == 0 else ():
        log.log_note(note)
    layout = layout_config(config, subject.model)  # frozen parameters need no buffers for gradients
    module = ShardedModule(subject.model.stages(), comm, layout)
    read = finite(subject.source.read, subject.source.path)
    world.run_on_all(partial(module.load_slices, read))
    yield module
    del module  # free the arrays before `close` frees their memory
    comm.close()


def measure(
    world: World,
    config: Config,
    subject: Candidate,
    sets: Sequence[WindowSet | AnswerSet],
    watchdog: Watchdog,
    importance: Importance | None = None,
) -> list[Array]:
    """Return the losses of a model in nats, float64 (count,) for each set, on all ranks. Collective.

    Raises UsageError on all ranks if weights or losses are not finite. `importance` collects the inputs of
    matrices while the losses of the first set are computed.
    """
    vectors: list[Array] = []
    with opened_module(world, config, subject, watchdog) as module:
        for sequences in sets:
            matrix = None if vectors else importance
            vectors.append(losses_of(module, sequences, subject.name, watchdog, matrix))
        del module
    for losses in vectors:
        if not np.isfinite(losses).all():
            place = int(np.argmin(np.isfinite(losses)))
            raise UsageError(
                f"{shown(subject.path)}: the loss of sequence {place} is {losses[place]}, expected a "
                f"number: the weights are damaged, or too large for --precision {config.precision}"
            )
    return vectors


def losses_of(
    module: ShardedModule,
    sequences: WindowSet | AnswerSet,
    name: str,
    watchdog: Watchdog,
    importance: Importance | None,
) -> Array:
    """Return the losses of one set on all ranks, and show a progress bar. Collective."""
    hidden = module.comm.rank > 0 or not watched()
    with tqdm(total=sequences.micro_batches, desc=name, leave=False, disable=hidden) as bar:

        def read(number: int) -> Inputs:
            watchdog.beat(f"micro-batch {number} of {sequences.micro_batches} of {name}")
            bar.update(min(module.comm.size, sequences.micro_batches - number))
            return sequences.micro(number)

        observer = nullcontext() if importance is None else observing(importance.observe)
        end_round = None if importance is None else importance.end_round
        with np.errstate(all="ignore"), observer:  # the caller reports losses that are not finite
            losses: Any = part_losses(module, sequences.micro_batches, sequences.count, read, end_round)
    return losses


# ------------------------------------------------------------------------------------------ quantization
# These measures compare two models, or weigh the columns of matrices for `export`.


def divergence(
    world: World,
    config: Config,
    candidates: Sequence[Candidate],
    windows: WindowSet,
    tokens: int,
    watchdog: Watchdog,
) -> dict[str, float]:
    """Compare two models over `tokens` tokens, as llama.cpp's perplexity tool does. Collective."""
    modules = list[ShardedModule]()

    def compute(number: int, sums: Array) -> None:
        watchdog.beat(f"micro-batch {number} of {windows.micro_batches} of both models")
        (x, batch, first), to_host = windows.micro(number), device.in_use().to_host
        logits, reference = (np.array(to_host(each.forward(x, training=False))) for each in modules)
        for place, part in enumerate(batch.parts, first):
            figures = differences_of(logits[part], reference[part], np.asarray(batch.targets)[part])
            sums[FIGURES * place : FIGURES * (place + 1)] = figures

    def idle() -> None:
        for module in modules:
            module.forward(None, training=False)

    model, base = candidates
    with (
        opened_module(world, config, model, watchdog) as first,
        opened_module(world, config, base, watchdog) as second,
        np.errstate(all="ignore"),
    ):
        modules += [first, second]
        sums = dealt_out(first, windows.micro_batches, FIGURES * windows.count, compute, idle)
        del first, second, modules[:]
    kl, squares, equal = (ordered_total(column) / tokens for column in sums.reshape(-1, FIGURES).T)
    return {"kl": kl, "rms_change": float(np.sqrt(squares)), "same_top": equal}


def differences_of(logits: Array, reference: Array, targets: Array) -> Array:
    """Return the sums (FIGURES,) over a window's positions, from logits (T, V) of a model and a reference."""
    total = np.zeros(FIGURES)
    for start in range(0, len(targets), ROWS):
        span = slice(start, start + ROWS)
        logs, base, ids = log_softmax(logits[span]), log_softmax(reference[span]), targets[span]
        indices = np.flatnonzero(ids != UNCOUNTED)
        logs, base, ids = logs[indices], base[indices], ids[indices]
        rows = np.arange(len(ids))
        changes = np.exp(logs[rows, ids]) - np.exp(base[rows, ids])
        equal = logs.argmax(1) == base.argmax(1)
        total += np.array([(np.exp(base) * (base - logs)).sum(), (changes**2).sum(), equal.sum()])
    return total


def log_softmax(logits: Array) -> Array:
    """Return the log-probabilities, in float64, of logits whose last axis is the vocabulary."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Importance:
    """Importance matrix: for each matrix, sums of its squared inputs and the number of inputs.

    Micro-batches are summed in a fixed order, like gradients, so sums do not depend on the number of ranks.
    """

    def __init__(self, model: ModelConfig, comm: Comm) -> None:
        self.places, end = dict[str, tuple[int, int, int]](), 0  # first element, matrices, columns
        for name, param in model.params().items():
            if name.startswith("blk.") and name.endswith(".weight") and len(param.shape) > 1:
                matrices, columns = param.shape[0] if len(param.shape) > 2 else 1, param.shape[-1]
                self.places[name] = end, matrices, columns
                end += matrices * (columns + 1)
        self._comm, self._partition = comm, partitioned(-(-end // 1024) * 1024, comm.size, 1024)
        self._full = np.zeros(self._partition.length, np.float32)
        part = self._partition.part(comm.rank)
        self._own = np.zeros(part.stop - part.start, np.float32)
        self._seen = set[str]()

    def sums_and_counts(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return views of a matrix's sums of squares (M, in) and of its numbers of inputs (M, 1)."""
        start, matrices, columns = self.places[name]
        table = self._full[start : start + matrices * (columns + 1)].reshape(matrices, columns + 1)
        return table[:, :columns], table[:, columns:]

    def observe(self, name: str, x: Any, starts: Any) -> None:
        """Add inputs x (..., in) of a matrix or of stacked experts; inputs of expert e begin at starts[e]."""
        if name not in self.places:
            return
        to_host = device.in_use().to_host
        flat, (sums, counts) = to_host(x).reshape(-1, x.shape[-1]), self.sums_and_counts(name)
        bounds = [0, len(flat)] if starts is None else to_host(starts).tolist()
        for matrix, (first, stop) in enumerate(pairwise(bounds)):
            squares = np.zeros(x.shape[-1])
            for start in range(first, stop, ROWS):
                squares += np.square(flat[start : min(start + ROWS, stop)].astype(np.float64)).sum(0)
            sums[matrix] += squares.astype(np.float32)
            counts[matrix] += stop - first
        self._seen.add(name)

    def end_round(self, contributors: int) -> None:
        """Add the sums that the ranks computed in a round to the totals. Collective."""
        arguments = self._full, self._own, self._partition
        self._comm.reduce_scatter(*arguments, contributors=contributors, accumulate=True).wait()
        self._full.fill(0)

    def totals(self) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Return the sums (M, in) and counts (M, 1) of each matrix with inputs, on all ranks. Collective."""
        self._comm.allgather(self._own, self._full, self._partition).wait()
        names = sorted(set[str]().union(*self._comm.allgather_object(self._seen)))
        return {name: self.sums_and_counts(name) for name in names}


# ------------------------------------------------------------------------------------------- predictions
# `--top-k-out`: each rank writes the records of its micro-batches at fixed offsets, so the file does not
# depend on the number of ranks, and a restarted job skips the micro-batches whose records exist.

LEAST = 1e-12  # lower bound of the total probability of the ids that a record omits


class TopK(HeadLoss):
    """Loss that finds the most likely ids of each position. `evaluate` stores them in `records` (B * T,)."""

    def __init__(self, teacher: TeacherFile) -> None:
        self._teacher, self.records = teacher, np.zeros(0, teacher.record)

    def evaluate(self, head: Any, p: Any, x: Any) -> list[Any]:
        flat, k = x.reshape(-1, x.shape[-1]), self._teacher.k
        self.records = records = np.zeros(len(flat), self._teacher.record)
        step = chunk_rows(len(flat), self._teacher.vocab)
        for part in (slice(start, start + step) for start in range(0, len(flat), step)):
            z = device.in_use().to_host(head.forward(p, flat[part])[0]).astype(np.float64)
            z /= self._teacher.temperature
            z -= z.max(axis=-1, keepdims=True)
            ids = np.argpartition(-z, k - 1, axis=-1)[:, :k]
            order = np.lexsort((ids, -np.take_along_axis(z, ids, -1)), axis=-1)
            ids = np.take_along_axis(ids, order, -1)
            logp = np.take_along_axis(z, ids, -1) - np.log(np.exp(z).sum(axis=-1, keepdims=True))
            rest = np.log(np.maximum(LEAST, 1 - np.exp(logp).sum(axis=-1)))
            records["ids"][part], records["logp"][part], records["rest"][part] = ids, logp, rest
        return []


def write_top_k(
    world: World, module: ShardedModule, windows: WindowSet, out: Path, teacher: TeacherFile
) -> None:
    """Write a file of a teacher's predictions, or continue the file of an interrupted job. Collective."""
    part, top = out.with_name(f"{out.name}.part"), TopK(teacher)

    def is_done(i: int) -> bool:
        """Return whether the last record of micro-batch i is in the file."""
        places = windows.places(i)
        return any(teacher.read(str(part), places[places >= 0][-1:]).tobytes())

    def start() -> list[int]:
        with writing():
            begin(part, teacher)
        return [i for i in range(windows.micro_batches) if not is_done(i)]

    remaining: list[int] = world.run_on_root(start)

    def compute(number: int, losses: Array) -> None:
        x, places = windows.micro(remaining[number])[0], windows.places(remaining[number]).reshape(-1)
        module.losses(x, top)
        cells = np.flatnonzero(places >= 0)
        breaks = np.flatnonzero((np.diff(cells) != 1) | (np.diff(places[cells]) != 1)) + 1
        with writing(), part.open("r+b") as file:
            for run in np.split(cells, breaks) if cells.size else ():
                offset = HEAD + int(places[run[0]]) * teacher.record.itemsize
                os.pwrite(file.fileno(), top.records[run].tobytes(), offset)

    if remaining:
        dealt_out(module, len(remaining), 1, compute)
    world.comm.barrier()
    world.on_root(lambda: finish(part, out, teacher))


def finish(part: Path, out: Path, teacher: TeacherFile) -> None:
    """Write the digest of the records into the header, and rename the file to its final name."""
    with writing(), part.open("r+b") as file:
        digest, _ = hashlib.sha256(), file.seek(HEAD)
        while block := file.read(READ_AT_ONCE):
            digest.update(block)
        os.pwrite(file.fileno(), replace(teacher, sha256=digest.hexdigest()).header(), 0)
        os.fsync(file.fileno())
        part.replace(out)
