"""How large a model is, from its sizes alone: no block is built but two, however many there are."""

from __future__ import annotations

from dataclasses import replace

from zero_mpi.errors import UsageError
from zero_mpi.models.model_config import ModelConfig

MOST_BLOCKS = 2_000  # twice the deepest that was ever trained; a plan of more takes minutes


def parameter_count(model: ModelConfig) -> int:
    """Elements of all parameters: those of one block and of what is around the blocks, and so many blocks."""
    one, two = (elements(replace(model, block_count=count)) for count in (1, 2))
    return one + (model.block_count - 1) * (two - one)


def elements(model: ModelConfig) -> int:
    """The number of elements of all parameters."""
    return sum(param.size for param in model.params().values())


def check_blocks(model: ModelConfig) -> ModelConfig:
    """The model itself; raises UsageError for one that would take minutes to build."""
    if model.block_count > MOST_BLOCKS:
        raise UsageError(
            f"--layers {model.block_count}: expected at most {MOST_BLOCKS:,}; this model would have "
            f"{parameter_count(model):,} parameters"
        )
    return model
