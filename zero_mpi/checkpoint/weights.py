"""One interface to weights of any format: a GGUF file, a checkpoint, a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zero_mpi.checkpoint.folders import ADAPTER, LATEST, MODEL
from zero_mpi.checkpoint.gguf.index import Metadata
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.folder import CONFIG, HuggingFaceFolder
from zero_mpi.checkpoint.huggingface.peft import PEFT_CONFIG
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.errors import FileError
from zero_mpi.files.open import exists, is_folder


class WeightSource(Protocol):
    """An index of weights by GGUF's names, keys and orders, whose data is read on demand."""

    @property
    def path(self) -> Path:
        """The file or folder."""

    @property
    def metadata(self) -> Metadata:
        """The model's keys, as in a GGUF."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Name -> shape and type."""

    def read(
        self, name: str, start: int = 0, stop: int | None = None, out: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return elements [start, stop) of the flattened tensor, (stop - start,) float32, in `out` if any."""

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Return the full tensor in its shape, float32."""


def open_weights(path: str | os.PathLike[str]) -> WeightSource:
    """Open a GGUF file (the first part if it is split), a checkpoint folder (model.gguf) or a Hugging Face
    folder (config.json and safetensors). Raise UsageError for any other or invalid path."""
    if not is_folder(path):
        if os.fspath(path).endswith(".safetensors"):
            raise FileError(f"{path}: expected a folder with {CONFIG}, found a file: use its folder")
        return GGUFFile.open(path)
    folder = Path(path)
    if exists(folder / MODEL):
        return GGUFFile.open(folder / MODEL)
    if exists(folder / CONFIG):
        return HuggingFaceFolder.open(folder)
    held = next((name for name in (ADAPTER, PEFT_CONFIG) if exists(folder / name)), None)
    if held is not None:
        raise FileError(
            f"{folder}: contains {held}, not a model. Use the model that it was trained on, and this folder "
            "with --lora (generate), --merge (export) or --lora-init (train); export --base MODEL converts "
            "only the adapter"
        )
    run = f"; it is a run folder: use {folder / LATEST}" if exists(folder / LATEST) else ""
    raise FileError(f"{folder}: expected {MODEL}, or {CONFIG} with safetensors, in this folder{run}")
