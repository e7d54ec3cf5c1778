"""What is beside adapters where a plan knows a model by its sizes, and no file says in which blocks it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gguf import GGMLQuantizationType

from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.export.encode import FILE_TYPES, kind_of
from zero_mpi.models import ModelConfig
from zero_mpi.ops.block_kinds import BLOCK_KINDS, BlockKind

BASES = tuple(FILE_TYPES)


def beside_adapters(config: Config, model: ModelConfig, base: str | None) -> ModelConfig:
    """A model of sizes with the adapters of the flags; raises UsageError for a base that cannot be.

    base: which of BASES `export` would write it in, whose blocks it then stays in; None: floats
    """
    adapted = replace(model, lora=config.adapters)
    if base is None:
        return adapted
    if adapted.lora is None:
        raise UsageError(f"--base {base}: beside no adapter: give --lora RANK as well")
    if config.device == "cuda":
        raise UsageError(f"--base {base}: on a GPU it is kept as floats: leave it out")
    return replace(adapted, lora=replace(adapted.lora, stored=tuple(blocks_of(model, base))))


def blocks_of(model: ModelConfig, base: str) -> Iterator[tuple[str, BlockKind]]:
    """Name and type of each tensor of a file in one of BASES."""
    wanted = GGMLQuantizationType[base.upper()]
    for name, param in model.params().items():
        yield name, BLOCK_KINDS[kind_of(TensorSpec(name, param.shape, wanted), wanted).name]
