"""Model architectures, by their GGUF names."""

from __future__ import annotations

from collections.abc import Iterable

from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.models.gpt2 import GPT2
from zero_mpi.models.llama import Llama, OLMo2, OLMoE, Qwen2, Qwen3, Qwen3MoE, SmolLM3
from zero_mpi.models.lora import LoRA
from zero_mpi.models.model_config import Metadata, ModelConfig, Read
from zero_mpi.models.relatives import Gemma3, Granite, GraniteMoE, Phi3

_KNOWN: tuple[type[ModelConfig], ...] = (Llama, GPT2, Qwen2, Qwen3, SmolLM3, Granite, OLMo2, Gemma3, Phi3)
_KNOWN += (Qwen3MoE, OLMoE, GraniteMoE)
ARCHITECTURES: dict[str, type[ModelConfig]] = {config.arch: config for config in _KNOWN}


def config_from_gguf(
    metadata: Metadata, tensors: Iterable[str], source: str, read: Read | None = None
) -> ModelConfig:
    """Return the configuration of a GGUF file; raise UsageError for an unknown architecture.

    `tensors`: name -> shape, or only the names. `read` (name -> elements, 1-D float32) reads parts of the
    configuration that are stored in tensors. Without `read`, a file with such a tensor is an error.
    """
    arch = GGUFKeys(metadata, source).architecture
    if arch not in ARCHITECTURES:
        found = f"architecture {show(arch or '')}"
        raise UsageError(f"{source}: {found} is not known; expected one of {', '.join(ARCHITECTURES)}")
    try:
        return ARCHITECTURES[arch].from_gguf(metadata, tensors, read)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error


__all__ = [
    "ARCHITECTURES",
    "GPT2",
    "Gemma3",
    "Granite",
    "GraniteMoE",
    "Llama",
    "LoRA",
    "ModelConfig",
    "OLMo2",
    "OLMoE",
    "Phi3",
    "Qwen2",
    "Qwen3",
    "Qwen3MoE",
    "SmolLM3",
    "config_from_gguf",
]
