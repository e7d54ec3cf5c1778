"""An adapter by GGUF's names as the folder that PEFT loads beside the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from zero_mpi.checkpoint.huggingface.folder import HuggingFaceFolder
from zero_mpi.checkpoint.huggingface.names import from_gguf
from zero_mpi.checkpoint.huggingface.peft import ENDS, PEFT_CONFIG, PEFT_MODEL, PREFIX, order_and_head
from zero_mpi.checkpoint.merged import lora_of
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.commands.export.huggingface import Outgoing
from zero_mpi.commands.export.safetensors_folder import Kinds, write_json, write_part
from zero_mpi.files.gguf_keys import GGUFKeys


def write_peft(adapter: WeightSource, base: WeightSource, wanted: str, folder: Path) -> Kinds:
    """Write configuration and factors into a new folder. Returns the type of each tensor."""
    keys = GGUFKeys(base.metadata, str(base.path))
    tensors = [outgoing_factor(adapter, spec, keys) for spec in adapter.tensors.values()]
    config = config_of(adapter, base, keys.architecture or "")
    folder.mkdir()
    write_json(folder / PEFT_CONFIG, config)
    write_part(folder / PEFT_MODEL, tensors, GGMLQuantizationType[wanted.upper()])
    return {tensor.name: wanted for tensor in tensors}


def outgoing_factor(adapter: WeightSource, spec: TensorSpec, keys: GGUFKeys) -> Outgoing:
    """One factor by PEFT's name and in its order of rows; FileError for one that has no place there."""
    target, dot, end = spec.name.rpartition(".")
    order, head = order_and_head(spec, target, dot + end, keys)
    name = f"{PREFIX}{layer_of(keys.architecture or '', target)}{ENDS[dot + end]}"
    return Outgoing(name, spec.shape, adapter, spec, order, head)


def layer_of(arch: str, weight: str) -> str:
    """The path of a layer in the model of transformers, by the name of its weight in GGUF."""
    return from_gguf(arch, weight).removesuffix(".weight")


def config_of(adapter: WeightSource, base: WeightSource, arch: str) -> dict[str, Any]:
    """The content of adapter_config.json; layers are named in full, for not all blocks need have the same."""
    lora = lora_of(adapter)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.path) if isinstance(base, HuggingFaceFolder) else None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": arch == "gpt2",
        "inference_mode": True,
        "target_modules": [layer_of(arch, name) for name in lora.targets],
    }
