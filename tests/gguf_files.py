"""Writers of GGUF files for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.header import TableRow, pack_file
from zero_mpi.models.model_config import ModelConfig


def write_raw(
    path: Path, architecture: str, metadata: Mapping[str, Any], table: Sequence[TableRow], **data: bytes
) -> Path:
    """Write a file of keys and tensors, whose elements are zeros unless `data` has their bytes."""
    header, offsets, total = pack_file(architecture, metadata, table)
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(total)
        for name, raw in data.items():
            file.seek(offsets[name])
            file.write(raw)
    return path


def write_tensors(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> Path:
    """Write a file of keys and float32 tensors; return its path."""
    assert all(array.dtype == np.float32 for array in tensors.values())
    table = [(name, array.shape) for name, array in tensors.items()]
    data = {name: array.tobytes() for name, array in tensors.items()}
    return write_raw(path, architecture, metadata, table, **data)


def random_weights(config: ModelConfig, scale: float = 0.2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: ((param.init == "ones") + scale * rng.standard_normal(param.shape)).astype(np.float32)
        for name, param in config.params().items()
    }
