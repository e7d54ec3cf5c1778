"""A Hugging Face folder (config.json and safetensors) as a source of weights with GGUF's names.

No file is converted in advance. `read` converts any range of elements to GGUF's order and only reads the
bytes of this range (full rows of a transposed matrix). So a rank can read its shards of a very large model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from zero_mpi.checkpoint.huggingface import names as hf_names
from zero_mpi.checkpoint.huggingface.config import DROPOUTS, DROPOUTS_ROTARY, architecture, biases_of, keys_of
from zero_mpi.checkpoint.huggingface.families import FAMILIES, GGUF_NAMES, ROTARY_CLASSES, Order, Settings
from zero_mpi.checkpoint.huggingface.rope import head_width, of_one_kind, rope_factors
from zero_mpi.checkpoint.safetensors import INDEX, SINGLE, SafetensorsModel, json_object
from zero_mpi.checkpoint.tensor_file import CHUNK, Floats, Metadata, TensorSpec, WeightSource
from zero_mpi.errors import FileError, prefixed
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.gguf_keys import ARCHITECTURE, GGUFKeys
from zero_mpi.files.open import exists, read_file
from zero_mpi.nn.adapters import FIRST, SECOND

CONFIG = "config.json"
MAX_CONFIG = 1 << 22  # maximum bytes of config.json, far above the usual size
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
TWICE = "tensor {}: expected once, found again under another name"


@dataclass(frozen=True)
class HuggingFaceTensor(TensorSpec):
    """A tensor with its GGUF name and shape, its stored `type`, and its name and order in the folder.

    `head`: number of rows per head, used if their order in the folder differs from GGUF's.
    """

    source: str
    order: Order = Order.SAME
    head: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    """(tensor in the folder, first element) of each run that forms this tensor. All runs are equally long."""


@dataclass(frozen=True)
class HuggingFaceFolder(WeightSource):
    """Index of a folder; data is read on demand, and no file stays open. `path` is the folder.

    `metadata` has the architecture's keys, but no tokenizer keys: the tokenizer's files are in the folder.
    `constants` are tensors computed from config.json: divisors of the rotary frequencies.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorSpec]
    config: Mapping[str, Any]
    weights: SafetensorsModel
    constants: dict[str, Floats]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HuggingFaceFolder:
        """Read and check config.json, headers and a tied head. Raise UsageError if any of them is invalid."""
        folder = Path(os.path.realpath(path))
        config = read_config(folder / CONFIG)
        with prefixed(f"{folder / CONFIG}:"):
            arch = architecture(Settings(config))
            settings = of_one_kind(arch, Settings(config))
            metadata = keys_of(arch, settings)
            biases, default = biases_of(arch, settings), arch == "gpt2" or ROTARY_CLASSES[arch].tied
            tied = settings.flag("tie_word_embeddings", default)
            width = 0 if arch == "gpt2" else head_width(arch, settings)
        weights = open_weights(folder)
        with prefixed(f"{folder}:"):
            tensors = _tensors(arch, weights, width, metadata)
            _check_head(tensors, weights, tied)
            if arch != "gpt2":
                _check_biases(tensors, biases)
            constants = rope_factors(arch, settings)  # after `_tensors`, which checks the width
        specs = {name: TensorSpec(name, value.shape, F32) for name, value in constants.items()}
        return cls(folder, metadata, tensors | specs, config, weights, constants)

    @property
    def dropout(self) -> str:
        """Names and values of the dropout settings that are not zero. We do not compute dropout."""
        defaults = DROPOUTS.get(architecture(Settings(self.config)), DROPOUTS_ROTARY)
        rates = {name: self.config.get(name, default) for name, default in defaults.items()}
        return ", ".join(f"{name} {shown(value)}" for name, value in rates.items() if value)

    def fill(self, spec: TensorSpec, start: int, out: Floats) -> None:
        if isinstance(spec, HuggingFaceTensor):
            fill(self.weights, spec, start, out)
        else:
            out[:] = self.constants[spec.name][start : start + out.size]


F32 = GGMLQuantizationType.F32


def fill(weights: SafetensorsModel, spec: HuggingFaceTensor, start: int, out: Floats) -> None:
    """Fill `out` with the elements of a tensor in GGUF's order, from element `start` on."""
    read, width = partial(weights.read, spec.source), spec.size // spec.shape[0]
    if spec.order == Order.HALVES:
        hf_names.fill_interleaved(read, spec.head, width, start, out)
    elif spec.order == Order.TRANSPOSED:
        hf_names.fill_transposed(read, spec.shape[0], width, start, out)
    else:
        parts = spec.parts or ((spec.source, 0),)
        size = spec.size // len(parts)
        for number in range(start // size, -(-(start + out.size) // size)):
            source, first = parts[number]
            a, b = max(start, number * size), min(start + out.size, (number + 1) * size)
            at = first - number * size
            weights.read(source, a + at, b + at, out[a - start : b - start])
        if spec.order == Order.LESS_ONE:
            out += 1


def read_config(path: Path) -> dict[str, Any]:
    return json_object(path, read_file(path, MAX_CONFIG, "a configuration"))


def open_weights(folder: Path) -> SafetensorsModel:
    """Open the safetensors files of a folder. Raise FileError if there are none."""
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        pickled = any(folder.glob("*.bin"))
        actual = "weights in another format: save them with safe_serialization=True" if pickled else "neither"
        raise FileError(f"{folder}: expected {SINGLE} or {INDEX} next to {CONFIG}, found {actual}")
    return SafetensorsModel.open_folder(folder)


def _tensors(arch: str, weights: SafetensorsModel, width: int, metadata: Metadata) -> dict[str, TensorSpec]:
    """Return the folder's tensors under their GGUF names, in the order in which the model uses them."""
    tensors: dict[str, TensorSpec] = {}
    stacks: dict[str, dict[int, HuggingFaceTensor]] = {}
    for source, entry in weights.tensors.items():
        parts = list(hf_names.parts_of(arch, source, entry.shape))
        for name, expert, first, shape in parts:
            part = HuggingFaceTensor(name, shape, weights.spec(source).type, source, parts=((source, first),))
            if stacks.setdefault(name, {}).setdefault(expert, part) is not part:
                raise FileError(TWICE.format(show(source)))
        plain = None if parts else hf_names.to_gguf(arch, source)
        if plain is not None and plain in tensors:
            raise FileError(TWICE.format(show(source)))
        if plain is not None:
            tensors[plain] = _tensor(arch, plain, weights.spec(source), width, metadata)
    tensors |= {name: stack_of(experts) for name, experts in stacks.items()}
    return dict(sorted(tensors.items(), key=lambda item: hf_names.place_of(arch, item[0])))


def stack_of(experts: Mapping[int, HuggingFaceTensor]) -> HuggingFaceTensor:
    """Return the matrices of all experts as one stacked tensor; a shared expert's matrix is not stacked."""
    count, first = len(experts), next(iter(experts.values()))
    if {*experts} != {*range(count)} or any(part.shape != first.shape for part in experts.values()):
        raise FileError(f"tensor {show(first.name)}: expected experts 0 to {count - 1} with equal shapes")
    shape = first.shape if first.name.endswith("_shexp.weight") else (count, *first.shape)
    return replace(first, shape=shape, parts=tuple(experts[e].parts[0] for e in range(count)))


def _tensor(arch: str, name: str, spec: TensorSpec, width: int, metadata: Metadata) -> HuggingFaceTensor:
    """Return one tensor. Raise FileError if its shape does not fit the order in which it is read."""
    order, shape = hf_names.order_of(arch, name), spec.shape
    if not shape or 0 in shape:
        raise FileError(f"tensor {show(spec.name)}: expected at least one element, found shape {shape}")
    if order == Order.TRANSPOSED:
        if len(shape) != 2:
            raise FileError(f"tensor {show(spec.name)}: expected a matrix, found shape {shape}")
        shape = shape[::-1]
    if order == Order.HALVES:
        key = "head_count" if ".attn_q." in name else "head_count_kv"
        rows = width * int(metadata[f"{GGUF_NAMES.get(arch, arch)}.attention.{key}"])
        if shape[0] != rows:
            raise FileError(f"tensor {show(spec.name)}: expected {rows} rows ({CONFIG}), found {shape[0]}")
    return HuggingFaceTensor(name, shape, spec.type, spec.name, order, width)


def _check_head(tensors: dict[str, TensorSpec], weights: SafetensorsModel, tied: bool) -> None:
    """Drop a tied head if it equals the embedding. Raise FileError if not, or if an untied one is missing."""
    if not tied and HEAD not in tensors:
        raise FileError("lm_head.weight is missing, and tie_word_embeddings is not true")
    if tied and HEAD in tensors and EMBEDDING in tensors:
        pair = [tensors.pop(HEAD), tensors[EMBEDDING]]
        names = [spec.source for spec in pair if isinstance(spec, HuggingFaceTensor)]
        chunks = zip(*(weights.raw_chunks(name, 4 * CHUNK) for name in names), strict=False)
        alike = (pair[0].shape, pair[0].type) == (pair[1].shape, pair[1].type)
        if not alike or any(bytes(a) != bytes(b) for a, b in chunks):
            raise FileError("lm_head.weight differs from the embedding, but tie_word_embeddings is true")


def _check_biases(tensors: Mapping[str, TensorSpec], biases: set[str]) -> None:
    """Raise FileError unless the projections with a bias are those to which config.json gives one."""
    for name in tensors:
        stem, _, kind = name.rpartition(".")
        part = stem.rpartition(".")[2]
        if kind == "bias" and part not in biases:
            raise FileError(f"{CONFIG} sets no bias for {part}, but the folder has {show(name)}")
        if kind == "weight" and part in biases and f"{stem}.bias" not in tensors:
            raise FileError(f"{CONFIG} sets a bias for {part}, but the folder has no {show(stem + '.bias')}")


PEFT_CONFIG, PEFT_MODEL = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = {FIRST: ".lora_A.weight", SECOND: ".lora_B.weight"}
TYPE, KIND, ALPHA = "general.type", "adapter.type", "adapter.lora.alpha"
READ_SETTINGS = {"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights"}
# Settings for layers, training or the base model. We ignore them: the tensors show all that we need.
UNUSED_SETTINGS = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
}  # fmt: skip
NOTHING: tuple[object, ...] = (None, False, "none", [], {})  # values of an option that is not used
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # other values change the base weights


@dataclass(frozen=True)
class PeftFolder(WeightSource):
    """Index of a PEFT folder; data is read on demand. `metadata` has the keys of an adapter's GGUF."""

    path: Path
    metadata: Metadata
    tensors: dict[str, HuggingFaceTensor]
    weights: SafetensorsModel

    @classmethod
    def open(cls, path: str | os.PathLike[str], base: Metadata) -> PeftFolder:
        """Read an adapter's settings and header. `base`: keys of its base. Raise FileError if invalid."""
        folder, keys = Path(os.path.realpath(path)), GGUFKeys(base, "the base model")
        arch = keys.architecture or ""
        if arch not in FAMILIES:
            raise FileError(f"{folder}: architecture {show(arch)} cannot be converted to Hugging Face")
        with prefixed(f"{folder / PEFT_CONFIG}:"):
            alpha = alpha_of(Settings(read_config(folder / PEFT_CONFIG)))
        if not exists(folder / PEFT_MODEL):
            expected = f"expected {PEFT_MODEL} next to {PEFT_CONFIG}, found none"
            raise FileError(f"{folder}: {expected}: save the adapter as safetensors")
        weights = SafetensorsModel.open(folder / PEFT_MODEL)
        with prefixed(f"{folder}:"):
            tensors = dict(_factor(weights, source, arch, keys) for source in weights.tensors)
        metadata = {ARCHITECTURE: arch, TYPE: "adapter", KIND: "lora", ALPHA: np.float32(alpha)}
        return cls(folder, metadata, tensors, weights)

    def fill(self, spec: HuggingFaceTensor, start: int, out: Floats) -> None:
        fill(self.weights, spec, start, out)


def alpha_of(settings: Settings) -> float:
    """Return alpha, so that alpha / rank scales the update. Raise FileError for another kind of adapter."""
    if settings.values.get("peft_type") != "LORA":
        raise settings.fault("peft_type", "LORA (only)")
    if settings.values.get("init_lora_weights") not in PLAIN_STARTS:
        raise settings.fault(
            "init_lora_weights", "an initialization that keeps the base weights (convert the adapter in PEFT)"
        )
    for name, value in settings.values.items():
        if name not in READ_SETTINGS | UNUSED_SETTINGS and value not in NOTHING:
            raise FileError(f"{name}: {quoted(value)} is not supported")
    rank, alpha = settings.size("r"), settings.number("lora_alpha")
    return alpha * math.sqrt(rank) if settings.flag("use_rslora", False) else alpha


def _factor(
    weights: SafetensorsModel, source: str, arch: str, keys: GGUFKeys
) -> tuple[str, HuggingFaceTensor]:
    """Return a factor's name in GGUF and the factor. Raise FileError for any other tensor."""
    spec = weights.spec(source)
    end, suffix = next(((e, s) for e, s in ENDS.items() if source.endswith(s)), ("", ""))
    stem = source.removeprefix(PREFIX).removesuffix(suffix)
    target = hf_names.to_gguf(arch, f"{stem}.weight") if end and source.startswith(PREFIX) else None
    if target is None or len(spec.shape) != 2 or 0 in spec.shape:
        actual = f"tensor {show(source)} of shape {spec.shape}"
        raise FileError(f"expected {PREFIX}LAYER{ENDS[FIRST]} and {ENDS[SECOND]}, found {actual}")
    order, head = order_and_head(spec, target, end, keys)
    return target + end, HuggingFaceTensor(target + end, spec.shape, spec.type, source, order, head)


def order_and_head(factor: TensorSpec, target: str, end: str, keys: GGUFKeys) -> tuple[Order, int]:
    """Return the order of a factor's rows in the folder, and rows per head. Factors are never transposed."""
    if end == SECOND and hf_names.order_of(keys.architecture or "", target) == Order.HALVES:
        return Order.HALVES, head_of(factor, target, keys)
    return Order.SAME, 0


def head_of(factor: TensorSpec, target: str, keys: GGUFKeys) -> int:
    """Return the rows per head in q's or k's second factor. Raise FileError if the heads do not fit."""
    heads = keys.integer(f"{keys.architecture}.attention.head_count", 1) or 1
    if ".attn_k." in target:
        heads = keys.integer(f"{keys.architecture}.attention.head_count_kv", 1) or heads
    if factor.shape[0] % (2 * heads):
        raise FileError(
            f"tensor {show(factor.name)}: expected rows of the {heads} heads of the base, found "
            f"{factor.shape[0]}: use the model that the adapter was trained on"
        )
    return factor.shape[0] // heads
