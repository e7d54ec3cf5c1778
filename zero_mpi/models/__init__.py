"""Model architectures, by their GGUF names. Each module of this package registers its classes."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.models.gpt2 import GPT2 as GPT2
from zero_mpi.models.llama import Llama as Llama
from zero_mpi.models.llama import OLMo2 as OLMo2
from zero_mpi.models.llama import OLMoE as OLMoE
from zero_mpi.models.llama import Qwen2 as Qwen2
from zero_mpi.models.llama import Qwen3 as Qwen3
from zero_mpi.models.llama import Qwen3MoE as Qwen3MoE
from zero_mpi.models.llama import SmolLM3 as SmolLM3
from zero_mpi.models.lora import LoRA as LoRA
from zero_mpi.models.model_config import ARCHITECTURES as ARCHITECTURES
from zero_mpi.models.model_config import Metadata, Read
from zero_mpi.models.model_config import ModelConfig as ModelConfig
from zero_mpi.models.relatives import Gemma3 as Gemma3
from zero_mpi.models.relatives import Granite as Granite
from zero_mpi.models.relatives import GraniteMoE as GraniteMoE
from zero_mpi.models.relatives import Phi3 as Phi3

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def config_from_gguf(
    metadata: Metadata, tensors: Iterable[str], source: str, read: Read | None = None
) -> ModelConfig:
    """Return the configuration of a GGUF file; raise UsageError for an unknown architecture.

    `tensors`: name -> shape, or only the names. `read` (name -> elements, 1-D float32) reads parts of the
    configuration that are stored in tensors. Without `read`, a file with such a tensor is an error.
    """
    arch = GGUFKeys(metadata, source).architecture
    if arch not in ARCHITECTURES:
        label = f"architecture {show(arch or '')}"
        raise UsageError(f"{source}: {label} is not known; expected one of {', '.join(ARCHITECTURES)}")
    try:
        return ARCHITECTURES[arch].from_gguf(metadata, tensors, read)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
