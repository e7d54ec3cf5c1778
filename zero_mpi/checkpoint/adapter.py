"""Adapters in files: the GGUF that llama.cpp loads beside the base model, or PEFT's folder; what fits a base.

Tensors are read in pairs, NAME.lora_a (R, C) and NAME.lora_b (O, R), for NAME of the base; what
`adapter.lora.alpha` says, over the rank, is what their product counts.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.index import Metadata
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.peft import ALPHA, KIND, PEFT_CONFIG, TYPE, PeftFolder
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import ARCHITECTURE, GGUFKeys
from zero_mpi.files.open import exists, is_folder
from zero_mpi.models import ModelConfig
from zero_mpi.models.lora import LoRA, is_adapter
from zero_mpi.nn.low_rank import FIRST

SAMPLE = 256  # elements of each tensor that tell one file of weights from another


def metadata(lora: LoRA) -> dict[str, Any]:
    """The keys of an adapter's file, beside the architecture of the base."""
    return {TYPE: "adapter", KIND: "lora", ALPHA: np.float32(lora.alpha)}


def open_adapter(path: str | os.PathLike[str], model: ModelConfig) -> WeightSource:
    """The adapter at a path; raises UsageError unless it is of the adapters that the model has."""
    file = adapter_source(path, {ARCHITECTURE: model.arch, **model.metadata()})
    found, lora = lora_of(file), model.lora
    alpha = np.float32(found.alpha)  # as a file has it, whose shortest text is a flag's value
    if lora is None or found.rank != lora.rank or alpha != np.float32(lora.alpha):
        raise UsageError(
            f"--lora-init {path}: has rank {found.rank} and alpha {alpha!s}; give --lora {found.rank} "
            f"--lora-alpha {alpha!s}"
        )
    wanted = {name: param.shape for name, param in model.params().items() if is_adapter(name)}
    for name in wanted.keys() | file.tensors.keys():
        shape = file.tensors[name].shape if name in file.tensors else None
        if shape != wanted.get(name):
            raise UsageError(
                f"--lora-init {path}: {name} has shape {shape}, expected {wanted.get(name)}: it is of other "
                "--lora-targets or another model"
            )
    return file


def adapter_source(path: str | os.PathLike[str], base: Metadata) -> WeightSource:
    """The index of an adapter's file, of the one in a checkpoint, or of PEFT's folder; raises UsageError.

    `base`: the keys of the model that it belongs to, which tell the order of rows in a folder of PEFT.
    """
    if not is_folder(path):
        return GGUFFile.open(path)
    if exists(Path(path) / PEFT_CONFIG):
        return PeftFolder.open(path, base)
    return GGUFFile.open(folders.weights_in(Path(path)))


def is_adapter_file(file: WeightSource) -> bool:
    """Whether its keys call it an adapter."""
    return GGUFKeys(file.metadata, str(file.path)).text(TYPE) == "adapter"


def lora_of(file: WeightSource) -> LoRA:
    """The rank, alpha and targets of an adapter's file; raises UsageError for a file that is none."""
    keys = GGUFKeys(file.metadata, str(file.path))
    ranks = {spec.shape[0] for name, spec in file.tensors.items() if name.endswith(FIRST)}
    alpha = keys.number(ALPHA, 0)
    if not is_adapter_file(file) or keys.text(KIND) != "lora" or alpha is None or len(ranks) != 1:
        raise UsageError(
            f"{file.path}: expected an adapter: {TYPE} adapter, {KIND} lora, {ALPHA}, tensors of one rank"
        )
    targets = tuple(name.removesuffix(FIRST) for name in file.tensors if name.endswith(FIRST))
    return LoRA(ranks.pop(), float(alpha), targets)


def weights_digest(source: WeightSource) -> str:
    """What tells one file of weights from another: names, shapes and the first numbers of each."""
    total = hashlib.sha256()
    for name, spec in source.tensors.items():
        total.update(f"{name} {spec.shape}".encode())
        total.update(source.read(name, 0, min(SAMPLE, spec.size)).tobytes())
    return total.hexdigest()[:32]
