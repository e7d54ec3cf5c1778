"""`evaluate --top-k-out`: the most likely ids of each token, over all ranks, into one file.

A rank writes the records of its micro-batches to their places, so the bytes do not depend on the number of
ranks, and a job that is started again leaves out the micro-batches whose records are there.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.commands.evaluate.measure import WindowSet
from zero_mpi.data.teacher_file import HEAD, TeacherFile, begin
from zero_mpi.device.types import Array
from zero_mpi.errors import writing
from zero_mpi.files.open import READ_AT_ONCE
from zero_mpi.launch.world import World
from zero_mpi.nn.loss import HeadLoss
from zero_mpi.ops.reference import chunk_rows
from zero_mpi.sharding import ShardedModule
from zero_mpi.sharding.evaluation import dealt_out

LEAST = 1e-12  # of the mass of all other ids


class TopK(HeadLoss):
    """The most likely ids of each position: `records` (B T,) after `evaluate`."""

    def __init__(self, teacher: TeacherFile) -> None:
        self._teacher, self.records = teacher, np.zeros(0, teacher.record)

    def evaluate(self, head: Any, p: Any, x: Any) -> list[Any]:
        flat, k = x.reshape(-1, x.shape[-1]), self._teacher.k
        self.records = found = np.zeros(len(flat), self._teacher.record)
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
            found["ids"][part], found["logp"][part], found["rest"][part] = ids, logp, rest
        return []


def write_top_k(
    world: World, module: ShardedModule, windows: WindowSet, out: Path, teacher: TeacherFile
) -> None:
    """Write the file of a teacher's predictions, or go on where an interrupted job stopped. Collective."""
    part = out.with_name(f"{out.name}.part")

    def start() -> list[int]:
        with writing():
            begin(part, teacher)
        return [i for i in range(windows.micro_batches) if not is_done(part, teacher, windows, i)]

    left: list[int] = world.from_root(start)
    top = TopK(teacher)

    def compute(number: int, losses: Array) -> None:
        batch, places = windows.micro(left[number]), windows.places(left[number])
        module.losses(batch.x, top)
        with writing(), part.open("r+b") as file:
            for row, at in enumerate(places):
                kept = np.flatnonzero(at >= 0)
                for run in np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1) if kept.size else ():
                    data = top.records[row * at.size + run].tobytes()
                    os.pwrite(file.fileno(), data, HEAD + int(at[run[0]]) * teacher.record.itemsize)

    if left:
        dealt_out(module, len(left), 1, compute)
    world.comm.barrier()
    world.on_root(lambda: finish(part, out, teacher))


def is_done(part: Path, teacher: TeacherFile, windows: WindowSet, i: int) -> bool:
    """Return whether the last record that micro-batch i writes is there."""
    places = windows.places(i)
    return any(teacher.read(str(part), places[places >= 0][-1:]).tobytes())


def finish(part: Path, out: Path, teacher: TeacherFile) -> None:
    """Put the digest into the header, and give the file its name."""
    with writing(), part.open("r+b") as file:
        total, _ = hashlib.sha256(), file.seek(HEAD)
        while block := file.read(READ_AT_ONCE):
            total.update(block)
        os.pwrite(file.fileno(), replace(teacher, sha256=total.hexdigest()).header(), 0)
        os.fsync(file.fileno())
        part.replace(out)
