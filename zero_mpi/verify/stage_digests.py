"""Digests of all that steps make on one rank, each under its name; held against those of other steps.

A layer in front of each stage shows what the stage is given and gives back, and an observer what comes of a
step. Nothing else of the steps changes, so they are those that training makes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np

from zero_mpi import device
from zero_mpi.checkpoint.saver import parts_of
from zero_mpi.files.foreign import shown
from zero_mpi.nn.fusions import loss_alone, loss_and_backward
from zero_mpi.nn.layer import Gradients, Layer, Param, Stage, Weights
from zero_mpi.session.observers import StepMade
from zero_mpi.session.setup import Session
from zero_mpi.sharding.witness import digest
from zero_mpi.verify.recompute import Comparison

BYTES = 16  # of a digest
FEW = 3  # that differ and are named


class Seen:
    """The digests of a computation in their order, written into a file, or held against those in it.

    found   the names of the first few that differ
    """

    def __init__(self, file: IO[bytes], *, holds: bool) -> None:
        self.found: list[str] = []
        self._file, self._holds = file, holds
        file.seek(0)

    def see(self, name: str, array: Any) -> None:
        """Take in an array under a name."""
        flat = np.ascontiguousarray(device.in_use().to_host(array)).reshape(-1)
        value = hashlib.blake2b(name.encode() + digest([flat]), digest_size=BYTES).digest()
        if not self._holds:
            self._file.write(value)
        elif len(self.found) < FEW and self._file.read(BYTES) not in (b"", value):
            self.found.append(name)


class ShownLayer(Layer):
    """A layer that hands on all it is asked for, and shows what it was given and gives.

    show    (name, array)
    """

    def __init__(self, stage: Stage, number: int, show: Callable[[str, Any], None]) -> None:
        self._layer, self._show, self._is_first = stage.layer, show, number == 0
        self._name = f"stage {number} ({shown(stage.scope)})"
        self.backward_reads_params = stage.layer.backward_reads_params

    def params(self) -> dict[str, Param]:
        return self._layer.params()

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        if self._is_first:
            self._show("the tokens", x)
        y, saved = self._layer.forward(p, x)
        self._show(f"what forward gives in {self._name}", y)
        return y, saved

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        dx = self._layer.backward(p, saved, dy, g)
        self._show_gradients(g, dx)
        return dx

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Any, Any]:
        """(loss, dx), as `Head.loss`."""
        self._show("the targets", targets)
        loss, dx = loss_and_backward(self._layer, p, x, targets, scale, g)
        self._show(f"the loss in {self._name}", np.float64(loss))
        self._show_gradients(g, dx)
        return loss, dx

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Any:
        """The loss alone, as `Head.evaluate`."""
        return loss_alone(self._layer, p, x, targets, scale)

    def _show_gradients(self, g: Gradients, dx: Any) -> None:
        for name, value in g.items():
            self._show(f"the gradient of {shown(name)}", value)
        if dx is not None:
            self._show(f"what backward gives in {self._name}", dx)


class ShownSteps(Comparison):
    """Shows what the steps of a session make: entered around each micro-batch, called at each step.

    others   hold the steps to the records of runs; what they find ends nothing
    """

    def __init__(self, session: Session, seen: Seen, others: Iterable[Comparison]) -> None:
        super().__init__(None)
        self._session, self._seen, self._others = session, seen, tuple(others)
        self._step = self._micro_batch = 0
        self._inside = False
        stages = session.module.stages
        session.module.stages = [
            Stage(stage.scope, ShownLayer(stage, number, self._show)) for number, stage in enumerate(stages)
        ]
        self._state("the state gone on from" if session.progress.step else "the first weights")

    def __enter__(self) -> None:
        self._inside = True

    def __exit__(self, *_: object) -> None:
        self._inside = False
        self._micro_batch += 1

    def begins(self, number: int) -> None:
        self._step, self._micro_batch = number, 0

    def computed(self, number: int) -> None:
        module = self._session.module
        module.sync_gradients()
        for unit in module.units:
            if unit.unit.trainable:
                for name, array in unit.unit.views(unit.updated[1]).items():
                    self._seen.see(f"step {number}, summed: the gradient of {shown(name)}", array)

    def ends(self, step: StepMade) -> None:
        for name in ("loss", "grad_norm", "lr"):
            self._seen.see(f"step {step.number}: {name}", np.float64(step.record[name]))
        self._state(f"step {step.number}, after the update")
        for comparison in self._others:
            comparison.ends(step)

    def _show(self, name: str, array: Any) -> None:
        """Take in an array of a micro-batch; an evaluation is none."""
        if self._inside:
            self._seen.see(f"step {self._step}, micro-batch {self._micro_batch}: {name}", array)

    def _state(self, when: str) -> None:
        for name, array in tensors(self._session):
            self._seen.see(f"{when}: {shown(name)}", array)


def tensors(session: Session) -> Iterator[tuple[str, Any]]:
    """All tensors of a checkpoint as the one rank holds them, by name."""
    for given in (one for part in parts_of(session.optimizer, session.description).values() for one in part):
        for name, _, values in given.runs(0, given.on_host(slice(None))):
            yield name, values
