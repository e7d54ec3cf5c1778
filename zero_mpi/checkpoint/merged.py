"""Files of adapters, and the weights of a base merged with an adapter: W + (alpha / R) b a."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.index import Metadata
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.folder import EMBEDDING, HEAD
from zero_mpi.checkpoint.huggingface.peft import ALPHA, KIND, PEFT_CONFIG, TYPE, PeftFolder
from zero_mpi.checkpoint.sound import keys_of
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.checkpoint.weights import WeightSource, open_weights
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import ARCHITECTURE
from zero_mpi.files.open import exists, is_folder
from zero_mpi.models import ModelConfig
from zero_mpi.models.lora import LoRA, is_adapter
from zero_mpi.nn.low_rank import FIRST, SECOND

SAMPLE = 256  # elements of each tensor that identify a file of weights


def metadata(lora: LoRA) -> dict[str, Any]:
    """Return the keys of an adapter's file, without the architecture of the base."""
    return {TYPE: "adapter", KIND: "lora", ALPHA: np.float32(lora.alpha)}


def open_adapter(path: str | os.PathLike[str], model: ModelConfig) -> WeightSource:
    """Open the adapter at a path; raise UsageError unless its rank, alpha and targets are the model's."""
    file = adapter_source(path, {ARCHITECTURE: model.arch, **model.metadata()})
    found, lora = lora_of(file), model.lora
    alpha = np.float32(found.alpha)  # as a file has it, whose shortest text is a flag's value
    if lora is None or found.rank != lora.rank or alpha != np.float32(lora.alpha):
        raise UsageError(
            f"--lora-init {path}: has rank {found.rank} and alpha {alpha!s}; use --lora {found.rank} "
            f"--lora-alpha {alpha!s}"
        )
    wanted = {name: param.shape for name, param in model.params().items() if is_adapter(name)}
    for name in wanted.keys() | file.tensors.keys():
        shape = file.tensors[name].shape if name in file.tensors else None
        if shape != wanted.get(name):
            raise UsageError(
                f"--lora-init {path}: {name} has shape {shape}, expected {wanted.get(name)}: it was trained "
                "with other --lora-targets or on another model"
            )
    return file


def adapter_source(path: str | os.PathLike[str], base: Metadata) -> WeightSource:
    """Open an adapter's file, the one in a checkpoint, or a folder of PEFT; raise UsageError if invalid.

    `base`: the keys of the base model, which determine the order of rows in a folder of PEFT.
    """
    if not is_folder(path):
        return GGUFFile.open(path)
    if exists(Path(path) / PEFT_CONFIG):
        return PeftFolder.open(path, base)
    return GGUFFile.open(folders.weights_in(Path(path)))


def is_adapter_file(file: WeightSource) -> bool:
    """Return whether the keys of the file name it an adapter."""
    return keys_of(file).text(TYPE) == "adapter"


def lora_of(file: WeightSource) -> LoRA:
    """Return rank, alpha and targets of an adapter's file; raise UsageError for any other file."""
    keys = keys_of(file)
    ranks = {spec.shape[-2:][0] for name, spec in file.tensors.items() if name.endswith(FIRST)}
    alpha = keys.number(ALPHA, 0)
    if not is_adapter_file(file) or keys.text(KIND) != "lora" or alpha is None or len(ranks) != 1:
        raise UsageError(
            f"{file.path}: expected an adapter: {TYPE} adapter, {KIND} lora, {ALPHA}, tensors of one rank"
        )
    targets = tuple(name.removesuffix(FIRST) for name in file.tensors if name.endswith(FIRST))
    return LoRA(ranks.pop(), float(alpha), targets)


def weights_digest(source: WeightSource) -> str:
    """Return a hash that identifies weights: of names, shapes and the first numbers of each tensor."""
    total = hashlib.sha256()
    for name, spec in source.tensors.items():
        total.update(f"{name} {spec.shape}".encode())
        total.update(source.read(name, 0, min(SAMPLE, spec.size)).tobytes())
    return total.hexdigest()[:32]


Floats = npt.NDArray[np.float32]


class MergedWeights:
    """A `WeightSource` of the base's weights; those that the adapter changes are merged, in float32.

    Raises UsageError for an adapter of another base.
    """

    def __init__(self, base: WeightSource, adapter: WeightSource) -> None:
        self._base, self._adapter, lora = base, adapter, lora_of(adapter)
        self.path, self.metadata = base.path, base.metadata
        self._scale = np.float32(lora.alpha / lora.rank)
        self.tensors = dict(base.tensors)
        self._stored = {} if HEAD in base.tensors else {HEAD: EMBEDDING}  # a tied head becomes one of its own
        for name in lora.targets:
            self.tensors[name] = self._adapted(name, lora.rank)

    def _adapted(self, name: str, rank: int) -> TensorSpec:
        """Return name, shape and type of the merged tensor; raise UsageError unless both factors fit it."""
        spec, tensors = self._base.tensors.get(self._stored.get(name, name)), self._adapter.tensors
        shapes = [tensors[name + end].shape if name + end in tensors else None for end in (FIRST, SECOND)]
        *stack, rows, width = (0, 0) if spec is None else spec.shape
        if spec is None or shapes != [(*stack, rank, width), (*stack, rows, rank)]:
            found = "none" if spec is None else spec.shape
            raise UsageError(
                f"{self._adapter.path}: has factors of {name} of shapes {shapes[0]} and {shapes[1]}, but "
                f"{self._base.path} has {found}: use the model that it was trained on"
            )
        return TensorSpec(name, spec.shape, GGMLQuantizationType.F32)

    def read(self, name: str, start: int = 0, stop: int | None = None, out: Floats | None = None) -> Floats:
        stop = self.tensors[name].size if stop is None else stop
        values = self._base.read(self._stored.get(name, name), start, stop, out)
        if name + FIRST in self._adapter.tensors and stop > start:
            with np.errstate(all="ignore"):  # the check below refuses values that are not finite
                added = self._product(name, start, stop)
                values += added
            if not np.isfinite(added).all():
                raise UsageError(f"{self._adapter.path}: its update of {name} is not finite")
        return values

    def _product(self, name: str, start: int, stop: int) -> Floats:
        """Return elements [start, stop) of the product that is added to a matrix: full rows, then cut.

        Of a stack it is the product of each matrix that has some of the rows.
        """
        (height, width), rank = self.tensors[name].shape[-2:], self._adapter.tensors[name + FIRST].shape[-2]
        first, last = start // width, -(-stop // width)
        b = self._adapter.read(name + SECOND, first * rank, last * rank).reshape(-1, rank)
        used = range(first // height, -(-last // height))
        a = self._adapter.read(name + FIRST, used.start * rank * width, used.stop * rank * width)
        ends = [slice(max(0, e * height - first), (e + 1) * height - first) for e in used]
        products = [b[part] @ each for part, each in zip(ends, a.reshape(-1, rank, width), strict=True)]
        rows = self._scale * np.concatenate(products)
        return rows.reshape(-1)[start - first * width : stop - first * width]

    def tensor(self, name: str) -> Floats:
        return self.read(name).reshape(self.tensors[name].shape)


def open_merged(path: str | os.PathLike[str], adapter: str | os.PathLike[str] | None) -> WeightSource:
    """Open weights as `open_weights` does, merged with the adapter at a path if given; raise UsageError."""
    source = open_weights(path)
    return source if adapter is None else MergedWeights(source, adapter_source(adapter, source.metadata))
