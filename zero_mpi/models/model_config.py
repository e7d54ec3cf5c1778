"""Base class of all architectures, `ModelConfig`, with common checks.

A configuration returns the stages that compute the model and the GGUF keys that describe it, and can be read
back from such keys. Sizes have the names of GGUF.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from zero_mpi.arguments import came, same_names, some, whole
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import MOST_SIZE, TOKENS, GGUFKeys, description_of
from zero_mpi.models.lora import LoRA
from zero_mpi.nn import Chain, Layer, Linear, Param, Recompute, Stage, stage_params
from zero_mpi.ops.block_kinds import BlockKind

Metadata = Mapping[str, Any]
Number = TypeVar("Number", int, float)
Read = Callable[[str], Array]
"""Function that returns the elements of a named tensor of a file, 1-D float32."""


ARCHITECTURES: dict[str, type[ModelConfig]] = {}
"""The architectures by GGUF name: each subclass of `ModelConfig` with an `arch`."""


@dataclass(frozen=True)
class ModelConfig:
    """Base class of architectures, with the sizes that all of them have."""

    arch: ClassVar[str]
    may_have_experts: ClassVar[bool] = False  # true if a feed-forward may be a mixture of experts
    needs_experts: ClassVar[bool] = False  # true if every feed-forward is a mixture of experts
    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    tied: bool
    lora: LoRA | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        if "arch" in vars(cls):
            ARCHITECTURES[cls.arch] = cls

    @classmethod
    def from_flags(cls, sizes: Mapping[str, Any]) -> Self:
        """Return the configuration that command-line flags describe; raise UsageError on invalid sizes."""
        sizes = check_sizes(sizes)
        dim, heads = sizes["dim"], sizes["heads"]
        if dim % heads:
            uneven = f"--heads {heads} does not divide --dim {dim}"
            raise UsageError(f"{uneven}: every head gets dim / heads columns")
        return cls(
            vocab_size=sizes["vocab_size"],
            context_length=sizes["context"],
            embedding_length=dim,
            block_count=sizes["layers"],
            head_count=heads,
            **cls.flag_fields(sizes) | cls.experts_from_flags(sizes),
        )

    @classmethod
    def flag_fields(cls, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return further fields of the architecture, from checked flags."""
        raise NotImplementedError

    @classmethod
    def experts_from_flags(cls, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a mixture of experts from checked flags; raise UsageError if they conflict."""
        count, used, width = (sizes[name] for name in EXPERTS)
        flags = [f"{spelled(name)} {sizes[name]}" for name in EXPERTS if not count and sizes[name]]
        if flags or (cls.needs_experts and not count):
            raise UsageError(f"{(flags or [f'--arch {cls.arch}'])[0]}: a mixture of experts needs --experts")
        if not count:
            return {}
        used = min(2, count) if used is None else used
        if not cls.may_have_experts or used > count:
            flag, limit = (f"--experts-used {used}", count) if used > count else (f"--experts {count}", 0)
            raise UsageError(f"{flag}: expected at most {limit} with --arch {cls.arch}")
        fields = {"expert_count": count, "expert_used_count": used}
        return fields if width is None else fields | {"feed_forward_length": width}

    @classmethod
    def from_gguf(cls, metadata: Metadata, tensors: Iterable[str], read: Read | None = None) -> Self:
        """Return the configuration for a file's keys and tensors (names, or name -> shape).

        `read` reads parts of the configuration that are stored in tensors. Raise UsageError for invalid keys.
        """
        tensors = tensors if isinstance(tensors, Mapping) else set(tensors)
        keys = ModelKeys(cls.arch, metadata)
        if keys.keys.flag(f"{cls.arch}.attention.causal") is False:
            raise UsageError(f"the GGUF key {cls.arch}.attention.causal = False is not supported")
        return cls(
            vocab_size=len(keys.keys.texts(TOKENS) or ()) or keys.size("vocab_size"),  # the tokenizer first
            context_length=keys.size("context_length"),
            embedding_length=keys.size("embedding_length"),
            block_count=keys.blocks(tensors),
            tied="output.weight" not in tensors,
            **cls.file_fields(keys, tensors, read),
        )

    @classmethod
    def file_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        """Return further fields of the architecture, from a file's keys and tensors."""
        raise NotImplementedError

    def layers(self) -> list[Stage]:
        """Return the stages in order of computation, without adapters."""
        raise NotImplementedError

    def head(self, norm: Layer) -> list[Stage]:
        """Return the stages of the final norm and the head; a tied head is in the embedding's scope."""
        name = "token_embd" if self.tied else "output"
        linear = Linear(name, self.embedding_length, self.vocab_size)
        if self.tied:
            return [Stage("output_norm", norm), Stage(name, linear)]
        return [Stage(name, Chain(norm, linear))]

    def metadata(self) -> dict[str, Any]:
        """Return the GGUF keys of this architecture, which llama.cpp needs to open the file."""
        return {f"{self.arch}.{name}": value for name, value in self.values_by_key().items()}

    def values_by_key(self) -> dict[str, Any]:
        """Return the values of the GGUF keys, which are without the architecture's prefix."""
        return {
            "context_length": np.uint32(self.context_length),
            "embedding_length": np.uint32(self.embedding_length),
            "block_count": np.uint32(self.block_count),
            "feed_forward_length": np.uint32(self.feed_forward_length),
            "attention.head_count": np.uint32(self.head_count),
            "vocab_size": np.uint32(self.vocab_size),
        }

    def stages(self, recompute: bool = False) -> list[Stage]:
        """Return the stages; with `recompute` each block keeps only its input for backward."""
        stages = self.layers() if self.lora is None else self.lora.adapt(self.layers())
        if not recompute:
            return stages
        return [
            Stage(stage.scope, Recompute(stage.layer)) if stage.scope.startswith("blk.") else stage
            for stage in stages
        ]

    @property
    def residual_std(self) -> float:
        """Standard deviation of initial weights that write to the residual stream, as in GPT-2 (2019)."""
        return float(0.02 / (2 * self.block_count) ** 0.5)

    @property
    def stored(self) -> dict[str, BlockKind]:
        """Parameters that are kept in the file's quantized blocks."""
        return {} if self.lora is None else dict(self.lora.stored)

    @property
    def stored_bytes(self) -> int:
        params = self.params() if self.stored else {}
        return sum(kind.bytes_of(params[name].size) for name, kind in self.stored.items() if name in params)

    def params(self) -> dict[str, Param]:
        """Return all parameters by name, adapters included, in the order of the file."""
        return stage_params(self.stages())

    def constants(self) -> dict[str, Array]:
        """Return float32 tensors of the file that are never trained and are written unchanged."""
        return {}

    def check_tensors(self, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
        """Raise UsageError with the differences unless a file has exactly this model's tensors."""
        tensors = stage_params(self.layers()) | self.constants()
        model_shapes = {name: tensor.shape for name, tensor in tensors.items()}
        missing, surplus = model_shapes.keys() - shapes.keys(), shapes.keys() - model_shapes.keys()
        if missing or surplus:
            raise UsageError(
                f"{source}: tensors do not match architecture {self.arch}: "
                f"missing {some(sorted(missing))}, surplus {some(sorted(surplus))}"
            )
        for name, shape in model_shapes.items():
            if shapes[name] != shape:
                raise UsageError(f"{source}: {name} has shape {shapes[name]}, expected {shape}")


NEUTRAL = (None, "none", 0, 1)  # these values and False (not True) mean the same as a missing key


class ModelKeys:
    """Reader of the keys of one architecture; errors name the key."""

    def __init__(self, arch: str, metadata: Metadata) -> None:
        self.arch, self.keys = arch, GGUFKeys(metadata)

    def number(self, name: str, default: float | None = None, *, least: float = 0) -> float:
        """Return the finite number at ARCH.NAME, or `default`; without a default the key is required."""
        return self._value(name, self.keys.number(f"{self.arch}.{name}", least), default)

    def size(self, name: str, default: int | None = None) -> int:
        """Return the positive integer at ARCH.NAME, or `default`; without a default the key is required."""
        return self._value(name, self.keys.integer(f"{self.arch}.{name}", 1, MOST_SIZE), default)

    def text(self, name: str) -> str | None:
        return self.keys.text(f"{self.arch}.{name}")

    def _value(self, name: str, value: Number | None, default: Number | None) -> Number:
        number = default if value is None else value
        if number is None:
            raise UsageError(f"the GGUF key {self.arch}.{name} is missing; a {self.arch} model needs it")
        return number

    def blocks(self, tensors: Iterable[str]) -> int:
        """Return ARCH.block_count; raise UsageError if the file has fewer blocks."""
        depth = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
        if (count := self.size("block_count")) > depth:
            raise UsageError(
                f"the GGUF key {self.arch}.block_count is {count}, but the file has tensors of {depth} blocks"
            )
        return count

    def require(self, name: str, supported: float) -> None:
        """Raise UsageError unless ARCH.NAME is absent or has the only supported value, `supported`."""
        value = self.number(name, supported, least=-math.inf)
        if value != supported:
            raise UsageError(
                f"the GGUF key {self.arch}.{name} = {value:g} is not supported; expected {supported:g}"
            )

    def refuse(self, names: Iterable[str]) -> None:
        """Raise UsageError if a file has keys that this package does not implement but must not ignore."""
        for name in names:
            value = self.keys.metadata.get(f"{self.arch}.{name}")
            if value is True or isinstance(value, np.ndarray | list) or value not in NEUTRAL:
                text = description_of(value)
                raise UsageError(f"the GGUF key {self.arch}.{name} = {text} is not supported")


REQUIRED = ("layers", "dim", "heads", "context", "vocab_size")
EXPERTS = ("experts", "experts_used", "expert_ffn")
OPTIONAL = ("kv_heads", "ffn", *EXPERTS, "tied")


def check_sizes(flags: Any) -> dict[str, Any]:
    """Return a model's sizes, from flags, as integers; raise UsageError for invalid names and values."""
    if not isinstance(flags, Mapping):
        raise UsageError(f"sizes of a model: expected a mapping such as {{'layers': 2}}, got {came(flags)}")
    sizes = dict.fromkeys(OPTIONAL) | dict(flags)
    try:
        same_names(f"sizes of a model ({', '.join((*REQUIRED, *OPTIONAL))})", sizes, (*REQUIRED, *OPTIONAL))
        for name in (*REQUIRED, "kv_heads", "ffn", *EXPERTS):
            if name in REQUIRED or sizes[name] is not None:
                sizes[name] = whole(spelled(name), sizes[name])
    except ValueError as error:
        raise UsageError(str(error)) from None
    for name in (*REQUIRED, "ffn", *EXPERTS):
        if sizes[name] is not None and sizes[name] < 1:
            raise UsageError(f"{spelled(name)} {sizes[name]}: expected at least 1")
    return sizes


def spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


MOST_BLOCKS = 2_000  # twice the depth of the deepest known model; planning more blocks takes minutes


def elements(model: ModelConfig) -> int:
    return sum(param.size for param in model.params().values())


def check_blocks(model: ModelConfig) -> ModelConfig:
    """Return the model; raise UsageError if it has more than MOST_BLOCKS blocks."""
    if model.block_count > MOST_BLOCKS:
        one, two = (elements(replace(model, block_count=count)) for count in (1, 2))  # blocks are equal
        raise UsageError(
            f"--layers {model.block_count}: expected at most {MOST_BLOCKS:,}; this model would have "
            f"{one + (model.block_count - 1) * (two - one):,} parameters"
        )
    return model
