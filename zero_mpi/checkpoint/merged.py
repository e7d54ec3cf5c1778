"""A base model and an adapter as one source of weights: what is read is W + (alpha / R) b a."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from zero_mpi.checkpoint.adapter import adapter_source, lora_of
from zero_mpi.checkpoint.gguf.index import Metadata
from zero_mpi.checkpoint.huggingface.folder import EMBEDDING, HEAD
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.checkpoint.weights import WeightSource, open_weights
from zero_mpi.errors import UsageError
from zero_mpi.nn.low_rank import FIRST, SECOND

Floats = npt.NDArray[np.float32]


class MergedWeights:
    """As `WeightSource`: the base's weights, in float32 and with their products where the adapter has any.

    Raises UsageError for an adapter of other weights.
    """

    def __init__(self, base: WeightSource, adapter: WeightSource) -> None:
        self._base, self._adapter, lora = base, adapter, lora_of(adapter)
        self._scale = np.float32(lora.alpha / lora.rank)
        self._specs = dict(base.tensors)
        self._stored = {} if HEAD in base.tensors else {HEAD: EMBEDDING}  # a tied head becomes one of its own
        for name in lora.targets:
            self._specs[name] = self._adapted(name, lora.rank)

    def _adapted(self, name: str, rank: int) -> TensorSpec:
        """What the sum is; raises UsageError unless both factors fit the base's matrix."""
        spec, tensors = self._base.tensors.get(self._stored.get(name, name)), self._adapter.tensors
        shapes = [tensors[name + end].shape if name + end in tensors else None for end in (FIRST, SECOND)]
        if spec is None or shapes != [(rank, spec.shape[-1]), (spec.shape[0], rank)]:
            found = "none" if spec is None else spec.shape
            raise UsageError(
                f"{self._adapter.path}: has factors of {name} of shapes {shapes[0]} and {shapes[1]}, and "
                f"{self._base.path} has {found}: give the model that it was trained on"
            )
        return TensorSpec(name, spec.shape, GGMLQuantizationType.F32)

    @property
    def path(self) -> Path:
        """Where the base lies."""
        return self._base.path

    @property
    def metadata(self) -> Metadata:
        """The keys of the base."""
        return self._base.metadata

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Name -> shape and type; what is merged is float32."""
        return self._specs

    def read(self, name: str, start: int = 0, stop: int | None = None, out: Floats | None = None) -> Floats:
        """As `WeightSource.read`."""
        stop = self._specs[name].size if stop is None else stop
        values = self._base.read(self._stored.get(name, name), start, stop, out)
        if name + FIRST in self._adapter.tensors and stop > start:
            with np.errstate(all="ignore"):  # what is not finite is refused
                added = self._product(name, start, stop)
                values += added
            if not np.isfinite(added).all():
                raise UsageError(f"{self._adapter.path}: what it adds to {name} is not finite")
        return values

    def _product(self, name: str, start: int, stop: int) -> Floats:
        """Elements [start, stop) of what is added to a matrix: of whole rows, then cut."""
        width, rank = self._specs[name].shape[-1], self._adapter.tensors[name + FIRST].shape[0]
        first, last = start // width, -(-stop // width)
        b = self._adapter.read(name + SECOND, first * rank, last * rank).reshape(-1, rank)
        rows = self._scale * (b @ self._adapter.tensor(name + FIRST))
        return rows.reshape(-1)[start - first * width : stop - first * width]

    def tensor(self, name: str) -> Floats:
        """As `WeightSource.tensor`."""
        return self.read(name).reshape(self._specs[name].shape)


def open_merged(path: str | os.PathLike[str], adapter: str | os.PathLike[str] | None) -> WeightSource:
    """`open_weights`, with the adapter at another path if one is named; raises UsageError."""
    source = open_weights(path)
    return source if adapter is None else MergedWeights(source, adapter_source(adapter, source.metadata))
