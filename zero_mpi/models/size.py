"""How large a model is, from its sizes alone."""

from __future__ import annotations

from dataclasses import replace

from zero_mpi.errors import UsageError
from zero_mpi.models.model_config import ModelConfig

MOST_BLOCKS = 2_000  # twice the deepest that was ever trained; a plan of more takes minutes


def elements(model: ModelConfig) -> int:
    """The number of elements of all parameters; blocks may differ, as with adapters in some of them."""
    return sum(param.size for param in model.params().values())


def check_blocks(model: ModelConfig) -> ModelConfig:
    """The model of flags itself; raises UsageError for one that would take minutes to build."""
    if model.block_count > MOST_BLOCKS:
        one, two = (elements(replace(model, block_count=count)) for count in (1, 2))  # its blocks are alike
        raise UsageError(
            f"--layers {model.block_count}: expected at most {MOST_BLOCKS:,}; this model would have "
            f"{one + (model.block_count - 1) * (two - one):,} parameters"
        )
    return model
