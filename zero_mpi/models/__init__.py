"""Model architectures, by their GGUF names."""

from __future__ import annotations

from collections.abc import Iterable

from zero_mpi.errors import UsageError
from zero_mpi.models.base import Metadata, ModelConfig
from zero_mpi.models.gpt2 import GPT2
from zero_mpi.models.llama import Llama

ARCHITECTURES: dict[str, type[ModelConfig]] = {config.arch: config for config in (Llama, GPT2)}


def config_from_gguf(metadata: Metadata, tensors: Iterable[str], source: str) -> ModelConfig:
    """The configuration of a GGUF file; raises UsageError for an architecture that is not built in."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise UsageError(
            f"{source}: architecture {arch!r} is not known; expected one of {', '.join(ARCHITECTURES)}"
        )
    try:
        return ARCHITECTURES[arch].from_gguf(metadata, tensors)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error


__all__ = ["ARCHITECTURES", "GPT2", "Llama", "ModelConfig", "config_from_gguf"]
