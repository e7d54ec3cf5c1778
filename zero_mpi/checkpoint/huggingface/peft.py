"""Reader of an adapter in PEFT's format (adapter_config.json and safetensors), by GGUF's names.

Such a folder does not name the architecture of its base, and llama, qwen2 and qwen3 name their layers alike;
only llama's rows of q and k have another order. So the caller passes the base's keys. Every PEFT option
beyond the plain product is refused by name: ignoring it would make another adapter.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zero_mpi.checkpoint.gguf.index import Metadata
from zero_mpi.checkpoint.huggingface.classes import Settings
from zero_mpi.checkpoint.huggingface.folder import HuggingFaceTensor, fill, read_config
from zero_mpi.checkpoint.huggingface.names import FAMILIES, Order, order_of, to_gguf
from zero_mpi.checkpoint.safetensors import SafetensorsModel
from zero_mpi.checkpoint.tensor_file import TensorSpec, checked_range, output
from zero_mpi.errors import FileError, prefixed
from zero_mpi.files.foreign import quoted, show
from zero_mpi.files.gguf_keys import ARCHITECTURE, GGUFKeys
from zero_mpi.files.open import exists
from zero_mpi.nn.low_rank import FIRST, SECOND

PEFT_CONFIG, PEFT_MODEL = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = {FIRST: ".lora_A.weight", SECOND: ".lora_B.weight"}
TYPE, KIND, ALPHA = "general.type", "adapter.type", "adapter.lora.alpha"
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights"}
# Settings that name the layers, the training or the base: they are ignored, the tensors say what is needed.
PASSED_OVER = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "target_modules", "task_type",
}  # fmt: skip
NOTHING: tuple[object, ...] = (None, False, "none", [], {})  # the values of an option that is not used
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the base as well


@dataclass(frozen=True)
class PeftFolder:
    """The index of a folder; the data is read on demand. `metadata` has the keys of an adapter's GGUF."""

    path: Path
    metadata: Metadata
    tensors: dict[str, HuggingFaceTensor]
    weights: SafetensorsModel

    @classmethod
    def open(cls, path: str | os.PathLike[str], base: Metadata) -> PeftFolder:
        """Read and check the headers, by the keys of the base. Raise FileError if one is invalid."""
        folder, keys = Path(os.path.realpath(path)), GGUFKeys(base, "the base model")
        arch = keys.architecture or ""
        if arch not in FAMILIES:
            raise FileError(f"{folder}: architecture {show(arch)} cannot be converted to Hugging Face")
        with prefixed(f"{folder / PEFT_CONFIG}:"):
            alpha = alpha_of(Settings(read_config(folder / PEFT_CONFIG)))
        if not exists(folder / PEFT_MODEL):
            raise FileError(
                f"{folder}: expected {PEFT_MODEL} next to {PEFT_CONFIG}, found none: save the "
                "adapter as safetensors"
            )
        weights = SafetensorsModel.open(folder / PEFT_MODEL)
        with prefixed(f"{folder}:"):
            tensors = dict(_tensor(weights, source, arch, keys) for source in weights.tensors)
        metadata = {ARCHITECTURE: arch, TYPE: "adapter", KIND: "lora", ALPHA: np.float32(alpha)}
        return cls(folder, metadata, tensors, weights)

    def read(
        self, name: str, start: int = 0, stop: int | None = None, out: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return elements of a tensor; see `WeightSource.read`."""
        spec = self.tensors[name]
        start, stop = checked_range(spec, start, stop)
        out = output(stop - start, out)
        fill(self.weights, spec, start, out)
        return out

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Return the full tensor in its shape, float32."""
        return self.read(name).reshape(self.tensors[name].shape)


def alpha_of(settings: Settings) -> float:
    """Return alpha: products are scaled by alpha / rank. FileError if LoRA is not the plain product."""
    if settings.values.get("peft_type") != "LORA":
        raise settings.fault("peft_type", "LORA (only)")
    if settings.values.get("init_lora_weights") not in PLAIN_STARTS:
        raise settings.fault(
            "init_lora_weights", "an initialization that keeps the base weights: convert the adapter in PEFT"
        )
    for name, value in settings.values.items():
        if name not in READ | PASSED_OVER and value not in NOTHING:
            raise FileError(f"{name}: {quoted(value)} is not supported")
    rank, alpha = settings.size("r"), settings.number("lora_alpha")
    return alpha * math.sqrt(rank) if settings.flag("use_rslora", False) else alpha


def _tensor(
    weights: SafetensorsModel, source: str, arch: str, keys: GGUFKeys
) -> tuple[str, HuggingFaceTensor]:
    """Return one factor with its GGUF name; `head` is the number of rows that are reordered together."""
    stored = weights.spec(source)
    ours, theirs = next(((o, t) for o, t in ENDS.items() if source.endswith(t)), ("", ""))
    stem = source.removeprefix(PREFIX).removesuffix(theirs)
    target = to_gguf(arch, f"{stem}.weight") if ours and source.startswith(PREFIX) else None
    if target is None or len(stored.shape) != 2 or 0 in stored.shape:
        found = f"tensor {show(source)} of shape {stored.shape}"
        raise FileError(f"expected {PREFIX}LAYER{ENDS[FIRST]} and {ENDS[SECOND]}, found {found}")
    order, head = order_and_head(stored, target, ours, keys)
    return target + ours, HuggingFaceTensor(target + ours, stored.shape, stored.type, source, order, head)


def order_and_head(factor: TensorSpec, target: str, end: str, keys: GGUFKeys) -> tuple[Order, int]:
    """Return the order of a factor's rows in a folder, and the rows per head; gpt2's are not transposed."""
    if end == SECOND and order_of(keys.architecture or "", target) == Order.HALVES:
        return Order.HALVES, head_of(factor, target, keys)
    return Order.SAME, 0


def head_of(factor: TensorSpec, target: str, keys: GGUFKeys) -> int:
    """Return the rows per head in the second factor of q or k; FileError if the base has no such heads."""
    heads = keys.whole(f"{keys.architecture}.attention.head_count", 1) or 1
    if ".attn_k." in target:
        heads = keys.whole(f"{keys.architecture}.attention.head_count_kv", 1) or heads
    if factor.shape[0] % (2 * heads):
        raise FileError(
            f"tensor {show(factor.name)}: expected rows of the {heads} heads of the base, found "
            f"{factor.shape[0]}: use the model that it was trained on"
        )
    return factor.shape[0] // heads
