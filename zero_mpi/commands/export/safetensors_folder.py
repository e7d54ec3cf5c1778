"""Export of a model into a Hugging Face folder: configuration, tensors in one file or several, tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from zero_mpi.checkpoint.huggingface.folder import CONFIG, HuggingFaceFolder
from zero_mpi.checkpoint.huggingface.names import from_gguf
from zero_mpi.checkpoint.huggingface.peft import ENDS, PEFT_CONFIG, PEFT_MODEL, PREFIX, order_and_head
from zero_mpi.checkpoint.merged import lora_of
from zero_mpi.checkpoint.safetensors import INDEX, SINGLE, SafetensorsStream
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.commands.export.encode import encoded_pieces
from zero_mpi.commands.export.huggingface import TOKENS, Outgoing, config_json, outgoing
from zero_mpi.data import tokenizer_config, tokenizer_json
from zero_mpi.files.atomic import write_to_disk
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.open import read_file

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # our types that safetensors can hold
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, MORE_TEMPLATES = "generation_config.json", "additional_chat_templates"
COPIED = (  # files copied from one Hugging Face folder to the next
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    GENERATION,
)

Kinds = dict[str, str]  # type of each tensor, by name


def write_folder(source: WeightSource, wanted: str, most: int, folder: Path) -> Kinds:
    """Write configuration, tensors and tokenizer into a new folder. Return the type of each tensor."""
    config, tensors = config_json(source, DTYPES[wanted]), outgoing(source)
    folder.mkdir()
    write_json(folder / CONFIG, config)
    kind = GGMLQuantizationType[wanted.upper()]
    width = 4 if wanted == "f32" else 2
    parts = in_parts(tensors, most // width)
    names = [SINGLE]
    if len(parts) > 1:
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
        where = {tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = width * sum(tensor.spec.size for tensor in tensors)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for name, part in zip(names, parts, strict=True):
        write_part(folder / name, part, kind)
    write_tokenizer(source, folder)
    special = {name: config[name] for name in TOKENS if config[name] is not None}
    if special and not isinstance(source, HuggingFaceFolder):
        write_json(folder / GENERATION, special)
    return {tensor.name: wanted for tensor in tensors}


def in_parts(tensors: Sequence[Outgoing], most: int) -> list[list[Outgoing]]:
    """Return the tensors in order, cut into files of at most `most` elements, or of one tensor."""
    parts: list[list[Outgoing]] = [[]]
    filled = 0
    for tensor in tensors:
        if parts[-1] and filled + tensor.spec.size > most:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.spec.size
    return parts


def write_part(path: Path, tensors: Sequence[Outgoing], kind: GGMLQuantizationType) -> None:
    """Write one safetensors file."""
    with SafetensorsStream(path, [(tensor.name, kind.name, tensor.shape) for tensor in tensors]) as stream:
        for tensor in tensors:
            what = f"{tensor.source.path}: tensor {show(tensor.spec.name)}"
            stream.write_raw(tensor.name, encoded_pieces(what, tensor.pieces(), kind))


def write_tokenizer(source: WeightSource, folder: Path) -> None:
    """Write the tokenizer's files, from a folder or from keys; none where there is no tokenizer."""
    if isinstance(source, HuggingFaceFolder):
        more = sorted(path.name for path in (source.path / MORE_TEMPLATES).glob("*.jinja"))
        for name in [*COPIED, *(f"{MORE_TEMPLATES}/{each}" for each in more)]:
            if os.path.isfile(source.path / name):
                (folder / name).parent.mkdir(exist_ok=True)
                write_to_disk(folder / name, read_file(source.path / name, expected="a tokenizer's file"))
    elif (keys := GGUFKeys(source.metadata, str(source.path))).tokenizer == "gpt2":
        write_json(folder / TOKENIZER, tokenizer_json(keys.metadata, keys.place))
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config(keys.metadata, keys.place))


def write_json(path: Path, content: Any) -> None:
    """Write a value as JSON text."""
    write_to_disk(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_peft(adapter: WeightSource, base: WeightSource, wanted: str, folder: Path) -> Kinds:
    """Write configuration and factors into a new folder. Return the type of each tensor."""
    keys = GGUFKeys(base.metadata, str(base.path))
    tensors = [outgoing_factor(adapter, spec, keys) for spec in adapter.tensors.values()]
    config = config_of(adapter, base, keys.architecture or "")
    folder.mkdir()
    write_json(folder / PEFT_CONFIG, config)
    write_part(folder / PEFT_MODEL, tensors, GGMLQuantizationType[wanted.upper()])
    return {tensor.name: wanted for tensor in tensors}


def outgoing_factor(adapter: WeightSource, spec: TensorSpec, keys: GGUFKeys) -> Outgoing:
    """Return one factor by PEFT's name and in its order of rows; FileError for one without a place there."""
    target, dot, end = spec.name.rpartition(".")
    order, head = order_and_head(spec, target, dot + end, keys)
    name = f"{PREFIX}{layer_of(keys.architecture or '', target)}{ENDS[dot + end]}"
    return Outgoing(name, spec.shape, adapter, spec, order, head)


def layer_of(arch: str, weight: str) -> str:
    """Return the path of a layer in the model of transformers, by the name of its weight in GGUF."""
    return from_gguf(arch, weight).removesuffix(".weight")


def config_of(adapter: WeightSource, base: WeightSource, arch: str) -> dict[str, Any]:
    """Return the content of adapter_config.json; layers are named in full, as blocks may differ."""
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
