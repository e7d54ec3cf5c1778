"""Frozen parameters that stay in the blocks of a file: kept, dealt out and gathered as bytes.

The bytes are parameters of their own, float32 words that travel as any others do (`stored`), under every
strategy and in memory that ranks share. What layers read is unpacked from them when a gather is waited for,
into a buffer of this rank's, and given up at the release: a rank has the floats of a unit or two at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import numpy as np

from zero_mpi import ops
from zero_mpi.device.types import Array
from zero_mpi.sharding.block_unit import BlockUnit
from zero_mpi.sharding.parameters import Context, Parameters, make_parameters
from zero_mpi.sharding.precision import FP32, as_kind

ReadBytes = Callable[[str, int, Array], object]  # (name, start, out): fill out (bytes,) from there on


class BlockParameters(Parameters):
    """The fourth way to have the whole: unpacked from gathered bytes, for as long as it is read."""

    unit: BlockUnit

    def __init__(self, unit: BlockUnit, context: Context, memory: Array | None) -> None:
        self.stored = make_parameters(unit.words, replace(context, precision=FP32, masters=None), memory)
        super().__init__(unit, replace(context, masters=None), self.stored.own, None)
        self._kind = context.precision.compute
        self._started = False
        self._buffer: Array | None = None

    def _make_master(self) -> None:
        """Do nothing: frozen parameters have no copy to update."""

    # -------------------------------------------------------------------------------- the whole, for layers

    def start_gather(self) -> None:
        if self.whole is None and not self._started:
            self.stored.start_gather()
            self._started = True

    def wait_gather(self) -> None:
        if not self._started:
            return
        self.stored.wait_gather()
        self._buffer = self.context.unpacked.take(self.unit.room_unpacked(self._kind))
        self.whole = as_kind(self._buffer, self.unit.length, self._kind)
        for name, view in self.views().items():
            self._unpack(name, view)
        self.stored.release()
        self._started = False

    def release(self) -> None:
        if self._started:
            self.stored.release()
            self._started = False
        if self._buffer is not None:
            self.context.unpacked.give(self._buffer)
            self._buffer = self.whole = None

    def _unpack(self, name: str, out: Array) -> None:
        """Fill out, of the parameter's shape, from the bytes that were gathered."""
        raw = self.stored.views()[name].view(np.uint8)[: self.unit.nbytes(name)]
        ops.dequantize(raw, self.unit.kinds[name].name, out.reshape(-1))

    def copy_of(self, name: str) -> Array:
        whole = np.empty(self.unit.params[name].shape, np.float32)
        was_started = self._started
        self.stored.start_gather()
        self.stored.wait_gather()
        self._unpack(name, whole)
        if not was_started:
            self.stored.release()
        return whole

    @property
    def is_gathered(self) -> bool:
        return self._started or self.whole is not None

    @property
    def _memory(self) -> Array:
        return self._buffer

    @property
    def in_use(self) -> bool:
        """Return whether a rank may have read the bytes since all ranks last met."""
        return self.stored.in_use

    @in_use.setter
    def in_use(self, value: bool) -> None:
        self.stored.in_use = value

    # ------------------------------------------------------------------------------------------- the bytes

    def load(self, read: ReadBytes) -> None:
        """Fill the bytes that this rank keeps."""
        for target, part in self.stored.filled:
            for segment in self.unit.words.segments(part):
                start = segment.offset * target.itemsize
                run = target[segment.where].view(np.uint8)
                read(segment.name, start, run[: self.unit.nbytes(segment.name) - start])

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def nbytes_whole(self) -> int:
        return self.stored.nbytes_whole

    @property
    def written(self) -> NoReturn:
        raise ValueError(
            f"unit {self.unit.name} is stored as quantized blocks: fill it with load_stored, read it with "
            "all_gather_param or state_dict"
        )

    elements = shard = kept = filled = updated = written
