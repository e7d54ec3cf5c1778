"""The sizes of a model as flags say them, held against those of the model that `--init` brings along."""

from __future__ import annotations

import dataclasses
from typing import Any

from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.models import ModelConfig

SIZES = {  # flag -> what a model calls it
    "arch": "arch",
    "layers": "block_count",
    "dim": "embedding_length",
    "heads": "head_count",
    "kv_heads": "head_count_kv",
    "ffn": "feed_forward_length",
    "tied": "tied",
    "vocab_size": "vocab_size",
}


def sizes_of(model: ModelConfig) -> dict[str, Any]:
    """A model's sizes by their flags; one that knows no key/value heads has as many as query heads."""
    return {name: getattr(model, size, model.head_count) for name, size in SIZES.items()}


def settled(config: Config, model: ModelConfig) -> Config:
    """The configuration with the sizes that the model of `--init` has, where one is named.

    Raises UsageError for a flag that says otherwise. The vocabulary is left to the tokenizer.
    """
    if config.init is None:
        return config
    sizes = sizes_of(model)
    for name, size in sizes.items():
        flag = getattr(config, name)
        if flag is not None and flag != size:
            raise UsageError(
                f"{as_flag(name, flag)}: the model of --init {config.init} has {as_flag(name, size)}; leave "
                "it out, or leave out --init for a model from nothing"
            )
    return dataclasses.replace(config, **{name: sizes[name] for name in SIZES if name != "vocab_size"})


def as_flag(name: str, value: Any) -> str:
    """A setting as it is written on a command line."""
    text = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{text}" if value else f"--no-{text}"
    return f"--{text} {value}"
