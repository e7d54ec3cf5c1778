"""One interface to weights in all formats: GGUF files, checkpoints and Hugging Face folders."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.folders import ADAPTER, LATEST, MODEL
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.folder import (
    ALPHA,
    CONFIG,
    EMBEDDING,
    HEAD,
    KIND,
    PEFT_CONFIG,
    TYPE,
    HuggingFaceFolder,
    PeftFolder,
)
from zero_mpi.checkpoint.mixes import QAT
from zero_mpi.checkpoint.tensor_file import CHUNK, Floats, Metadata, TensorSpec
from zero_mpi.checkpoint.tensor_file import WeightSource as WeightSource
from zero_mpi.data import tokenizer_from_json
from zero_mpi.data.tokenizers.added_tokens import with_tokens
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import ARCHITECTURE, TOKENIZER, GGUFKeys
from zero_mpi.files.open import exists, is_folder
from zero_mpi.models import ModelConfig
from zero_mpi.models.lora import LoRA
from zero_mpi.nn.adapters import ADDED, FIRST, SECOND, product


def keys_of(file: WeightSource) -> GGUFKeys:
    return GGUFKeys(file.metadata, str(file.path))


def open_weights(path: str | os.PathLike[str]) -> WeightSource:
    """Open a GGUF file (the first of a split model), a checkpoint folder (its model.gguf) or a Hugging Face
    folder (config.json and safetensors). Raise UsageError if the path is none of these, or is invalid."""
    if not is_folder(path):
        if os.fspath(path).endswith(".safetensors"):
            raise FileError(f"{path}: expected a folder with {CONFIG}, found a file: use its folder")
        return GGUFFile.open(path)
    folder = Path(path)
    if exists(folder / MODEL):
        return GGUFFile.open(folder / MODEL)
    if exists(folder / CONFIG):
        return HuggingFaceFolder.open(folder)
    file = next((name for name in (ADAPTER, PEFT_CONFIG) if exists(folder / name)), None)
    if file is not None:
        raise FileError(
            f"{folder}: contains {file}, not a model. Use the model that it was trained on, and this folder "
            "with --lora (generate), --merge (export) or --lora-init (train); export --base MODEL converts "
            "only the adapter"
        )
    raise unsuitable(folder, f"{MODEL}, or {CONFIG} with safetensors,")


def unsuitable(folder: Path, expected: str) -> FileError:
    """Return the error of a folder without the expected files, with a hint if it is a run folder."""
    hint = f"; it is a run folder: use {folder / LATEST}" if exists(folder / LATEST) else ""
    return FileError(f"{folder}: expected {expected} in this folder{hint}")


TOKENS_ADDED = "adapter.lora.added_tokens"  # key for the tokens that --add-tokens added
ACTIVATED = "adapter.alora.invocation_tokens"  # key of adapters that only act after these tokens
SAMPLE = 256  # number of elements per tensor in the hash that identifies weights


def adapter_metadata(lora: LoRA) -> dict[str, Any]:
    """Return the keys of an adapter's file, except the architecture of its base."""
    return {TYPE: "adapter", KIND: "lora", ALPHA: np.float32(lora.alpha)}


def open_adapter(
    path: str | os.PathLike[str], model: ModelConfig, tokens: Sequence[str] = ()
) -> WeightSource:
    """Open the adapter at a path. Raise UsageError unless its rank, alpha and targets are those of the model,
    and its added tokens are `tokens`."""
    file = adapter_source(path, {ARCHITECTURE: model.arch, **model.metadata()})
    adapter, lora = lora_of(file), model.lora
    alpha = np.float32(adapter.alpha)  # float32 as in the file, so that it prints like the flag
    if lora is None or adapter.rank != lora.rank or alpha != np.float32(lora.alpha):
        raise UsageError(
            f"--lora-init {path}: has rank {adapter.rank} and alpha {alpha!s}; use --lora {adapter.rank} "
            f"--lora-alpha {alpha!s}"
        )
    if (keys_of(file).texts(TOKENS_ADDED) or []) != list(tokens):
        raise UsageError(f"--lora-init {path}: was trained with other --add-tokens: use the same file")
    suffixes = (FIRST, SECOND, ADDED)
    shapes = {name: param.shape for name, param in model.params().items() if name.endswith(suffixes)}
    for name in shapes.keys() | file.tensors.keys():
        shape = file.tensors[name].shape if name in file.tensors else None
        if shape != shapes.get(name):
            raise UsageError(
                f"--lora-init {path}: {name} has shape {shape}, expected {shapes.get(name)}: it was trained "
                "with other --lora-targets or on another model"
            )
    return file


def adapter_source(path: str | os.PathLike[str], base: Metadata) -> WeightSource:
    """Open an adapter file, the adapter in a checkpoint, or a PEFT folder. Raise UsageError if it is invalid.

    `base`: keys of the base model, which determine the order of rows in a PEFT folder.
    """
    if not is_folder(path):
        return GGUFFile.open(path)
    if exists(Path(path) / PEFT_CONFIG):
        return PeftFolder.open(path, base)
    file = folders.weights_in(Path(path))
    if not exists(file):
        raise unsuitable(Path(path), f"{ADAPTER} or {PEFT_CONFIG}")
    return GGUFFile.open(file)


def is_adapter_file(file: WeightSource) -> bool:
    return keys_of(file).text(TYPE) == "adapter"


def lora_of(file: WeightSource) -> LoRA:
    """Return the rank, alpha and targets of an adapter. Raise UsageError if the file is not an adapter.

    An alpha of 0 in the file means a scale of 1, as in llama.cpp.
    """
    keys = keys_of(file)
    targets, seconds = (
        [name.removesuffix(end) for name in file.tensors if name.endswith(end)] for end in (FIRST, SECOND)
    )
    ranks = {file.tensors[name + FIRST].shape[-2:][0] for name in targets}
    alpha = keys.number(ALPHA, 0)
    if not is_adapter_file(file) or keys.text(KIND) != "lora" or alpha is None or len(ranks) != 1:
        raise UsageError(
            f"{file.path}: expected an adapter ({TYPE} adapter, {KIND} lora, a number {ALPHA}, one rank)"
        )
    if ACTIVATED in file.metadata:
        raise UsageError(f"{file.path}: {ACTIVATED}: expected an adapter that is active at every token")
    if lone := {*targets} ^ {*seconds}:
        raise UsageError(f"{file.path}: expected {FIRST} and {SECOND} of {show(min(lone))}, found only one")
    rank = ranks.pop()
    return LoRA(rank, alpha or float(rank), tuple(targets))


def weights_digest(source: WeightSource) -> str:
    """Return a hash that identifies weights, made of names, shapes and first elements of all tensors."""
    total = hashlib.sha256()
    for name, spec in source.tensors.items():
        total.update(f"{name} {spec.shape}".encode())
        total.update(source.read(name, 0, min(SAMPLE, spec.size)).tobytes())
    return total.hexdigest()[:32]


class GrownWeights(WeightSource):
    """Weights and keys of `base`, whose embedding and head get rows for `tokens`, from id `first` on.

    A new row starts as the mean of the rows before `first`. If `trained`, an adapter's checkpoint, is
    given, its tensors `NAME.added` replace all rows from `first` on. `read` accepts these names too.
    """

    def __init__(self, base: Any, tokens: Sequence[str], trained: Any = None) -> None:
        self.base, self.tokens, self.path, self._adapter = base, list(tokens), base.path, trained
        self._means: dict[str, Floats] = {}
        keys, vocabulary = base.metadata, base.tensors[EMBEDDING].shape[0]
        if isinstance(base, HuggingFaceFolder) and TOKENIZER not in keys:
            keys = {**keys, **tokenizer_from_json(base.path / "tokenizer.json", vocabulary).metadata()}
        self.metadata, self.first = with_tokens(keys, tokens, str(base.path))
        self.rows = max(vocabulary, self.first + len(tokens)) - self.first
        self.tensors: dict[str, Any] = dict(base.tensors)
        for name in {EMBEDDING, HEAD} & base.tensors.keys():
            spec = base.tensors[name]
            self.tensors[name] = replace(spec, shape=(self.first + self.rows, spec.shape[1]))
            shape = None if trained is None else trained.spec(name + ADDED).shape
            if shape not in (None, (self.rows, spec.shape[1])):
                raise UsageError(f"{base.path}: expected the model to which {self.rows} rows were added")

    def changes(self, name: str) -> bool:
        return name in (EMBEDDING, HEAD)

    def spec(self, name: str) -> TensorSpec:
        stem = name.removesuffix(ADDED)
        spec: TensorSpec = self.tensors[stem]
        return spec if stem == name else replace(spec, name=name, shape=(self.rows, spec.shape[1]))

    def fill(self, spec: TensorSpec, start: int, out: Floats) -> None:
        name = spec.name.removesuffix(ADDED)
        if not self.changes(name):
            self.base.read(name, start, start + out.size, out)
            return
        border = self.first * spec.shape[1]
        start += border if spec.name != name else 0
        count = min(out.size, max(0, border - start))
        self.base.read(name, start, start + count, out[:count])
        if count < out.size:
            out[count:] = self._new_rows(name, start + count - border, start + out.size - border)

    def _new_rows(self, name: str, start: int, stop: int) -> Floats:
        """Return elements [start, stop) of the rows from `first` on: new rows, followed by unused rows."""
        if self._adapter is not None:
            result: Floats = self._adapter.read(name + ADDED, start, stop)
            return result
        spec, new = self.base.tensors[name], len(self.tokens)
        if name not in self._means:
            self._means[name] = self._mean(name)
        rows = np.tile(self._means[name], (self.rows, 1))
        if self.rows > new:  # unused rows come after the new tokens
            rows[new:] = self.base.read(name, (self.first + new) * spec.shape[1]).reshape(-1, spec.shape[1])
        return rows.reshape(-1)[start:stop]

    def _mean(self, name: str) -> Floats:
        """Return the mean (C,) of the rows before the new rows, summed in float64 from first to last."""
        width = self.base.tensors[name].shape[1]
        total, size = np.zeros(width), max(1, CHUNK // width)
        for at in range(0, self.first, size):
            rows = self.base.read(name, at * width, min(at + size, self.first) * width)
            total += rows.reshape(-1, width).sum(axis=0, dtype=np.float64)
        return (total / self.first).astype(np.float32)


def tokens_of(source: Any) -> list[str]:
    return source.tokens if isinstance(source, GrownWeights) else []


class MergedWeights(WeightSource):
    """Weights of a base model. Matrices that an adapter changes include its update and are float32.

    Raises UsageError if the adapter's factors do not fit the base.
    """

    def __init__(self, base: WeightSource, adapter: WeightSource) -> None:
        tokens = keys_of(adapter).texts(TOKENS_ADDED)
        if tokens:
            base = GrownWeights(base.base if isinstance(base, GrownWeights) else base, tokens, adapter)
        self.base, self._adapter, lora = base, adapter, lora_of(adapter)
        self.path, self.metadata = base.path, base.metadata
        self._qat_type = keys_of(adapter).text(QAT)  # type to which training rounded the merged weights
        if self._qat_type is not None:
            self.metadata = {**base.metadata, QAT: self._qat_type}
        self._scale = np.float32(lora.alpha / lora.rank)
        self.tensors = dict(base.tensors)
        self._base_names = {} if HEAD in base.tensors else {HEAD: EMBEDDING}  # a tied head gets a tensor
        for name in lora.targets:
            self.tensors[name] = self._merged_spec(name, lora.rank)

    def _merged_spec(self, name: str, rank: int) -> TensorSpec:
        """Return name, shape and type of a merged tensor. Raise UsageError unless both factors fit it."""
        spec, tensors = self.base.tensors.get(self._base_names.get(name, name)), self._adapter.tensors
        shapes = [tensors[name + end].shape if name + end in tensors else None for end in (FIRST, SECOND)]
        *stack, rows, width = (0, 0) if spec is None else spec.shape
        if spec is None or shapes != [(*stack, rank, width), (*stack, rows, rank)]:
            shape = "none" if spec is None else spec.shape
            raise UsageError(
                f"{self._adapter.path}: has factors of {name} of shapes {shapes[0]} and {shapes[1]}, but "
                f"{self.base.path} has {shape}: use the model that it was trained on"
            )
        return TensorSpec(name, spec.shape, GGMLQuantizationType.F32)

    def changes(self, name: str) -> bool:
        return name + FIRST in self._adapter.tensors

    def fill(self, spec: TensorSpec, start: int, out: Floats) -> None:
        name, stop = spec.name, start + out.size
        self.base.read(self._base_names.get(name, name), start, stop, out)
        if self.changes(name) and stop > start:
            with np.errstate(all="ignore"):  # the check below finds values that are not finite
                update = self._product(name, start, stop)
                out += update
            if not np.isfinite(update).all():
                raise UsageError(f"{self._adapter.path}: its update of {name} is not finite")

    def _product(self, name: str, start: int, stop: int) -> Floats:
        """Return elements [start, stop) of a matrix's update, which is computed for full rows and then cut.

        If matrices are stacked, the update is computed for each matrix that has some of these rows.
        """
        (height, width), rank = self.tensors[name].shape[-2:], self._adapter.tensors[name + FIRST].shape[-2]
        first, last = start // width, -(-stop // width)
        b = self._adapter.read(name + SECOND, first * rank, last * rank).reshape(-1, rank)
        matrices = range(first // height, -(-last // height))
        a = self._adapter.read(name + FIRST, matrices.start * rank * width, matrices.stop * rank * width)
        parts = [slice(max(0, e * height - first), (e + 1) * height - first) for e in matrices]
        multiply = np.matmul if self._qat_type is None else product
        stack = a.reshape(-1, rank, width)
        products = [multiply(b[part], matrix) for part, matrix in zip(parts, stack, strict=True)]
        rows = self._scale * np.concatenate(products)
        return rows.reshape(-1)[start - first * width : stop - first * width]


def folder_of(source: Any) -> HuggingFaceFolder | None:
    """Return the Hugging Face folder from which a source, perhaps merged, takes its tokenizer, or None."""
    file = source.base if isinstance(source, MergedWeights) else source
    return file if isinstance(file, HuggingFaceFolder) else None


def gguf_of(source: Any, name: str = "") -> GGUFFile | None:
    """Return the GGUF file under a source.

    None if there is none, or if it does not hold the tensor `name` as the source returns it.
    """
    while isinstance(source, GrownWeights | MergedWeights):
        if source.changes(name):
            return None
        source = source.base
    return source if isinstance(source, GGUFFile) else None


def open_merged(path: str | os.PathLike[str], adapter: str | os.PathLike[str] | None) -> WeightSource:
    source = open_weights(path)
    return source if adapter is None else MergedWeights(source, adapter_source(adapter, source.metadata))
