"""LoRA configuration of a model: the projections that get adapters (`nn.adapters`), and their rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zero_mpi.errors import UsageError
from zero_mpi.nn import Embedding, Layer, Linear, Stage
from zero_mpi.nn.layer import Composite
from zero_mpi.ops.block_kinds import BlockKind

# The head gets an adapter only if a pattern begins with "output"; router and experts only if a pattern
# contains their string in NAMED (adapters of experts are large). PEFT's all-linear leaves them out too.
HEAD = "output.weight"
NAMED = ("ffn_gate_inp", "_exps")
TARGETS = ("blk.*.attn_*.weight", "blk.*.ffn_*.weight")  # projections of attention and of dense feed-forwards
FROZEN = ("!*.weight.*",)  # every name without a suffix of adapters or added rows


@dataclass(frozen=True)
class LoRA:
    """Settings of adapters: rank, patterns of the weights that get adapters, and alpha (scale alpha / rank).

    stored: names and types of frozen weights that are kept in the file's quantized blocks
    rounding: names and types of matrices that layers merge with their adapters and round to the type
    added: number of added tokens; their rows, the last of embedding and head, are trained
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    stored: tuple[tuple[str, BlockKind], ...] = ()
    rounding: tuple[tuple[str, str], ...] = ()
    added: int = 0

    def adapt(self, stages: list[Stage]) -> list[Stage]:
        """Add adapters to the projections that match a pattern, split off added rows, return the stages."""
        kinds = dict(self.rounding)
        for name, linear in projections(stages).items():
            if any(is_meant(name, pattern) for pattern in self.targets):
                linear.adapt(self.rank, self.alpha / self.rank, kinds.get(name))
        for stage in (stages[0], stages[-1]) if self.added else ():
            for layer in parts_of(stage.layer):
                if isinstance(layer, Embedding | Linear):
                    layer.split(self.added)
        return stages

    def check(self, stages: list[Stage]) -> None:
        """Raise UsageError for a pattern, other than a default pattern, that matches no projection."""
        linears = projections(stages)
        for pattern in self.targets if self.targets != TARGETS else ():
            if not any(is_meant(name, pattern) for name in linears):
                hint = "" if HEAD in linears else "; llama.cpp has no adapters for a tied head: leave it out"
                raise UsageError(
                    f"--lora-targets {pattern}: matches no projection; names are like "
                    f"{', '.join(list(linears)[:3])}, ..., {list(linears)[-1]}{hint}"
                )


def is_meant(name: str, pattern: str) -> bool:
    """Return whether a pattern selects a projection; see HEAD and NAMED for exceptions."""
    eligible = name != HEAD or pattern.startswith("output")
    return fnmatchcase(name, pattern) and eligible and all(part in pattern for part in NAMED if part in name)


def projections(stages: Sequence[Stage]) -> dict[str, Linear]:
    """Return the linear layers after the embedding by weight name, including an untied head."""
    blocks = (stage for stage in stages if stage.scope.startswith(("blk.", "output")))
    parts = (part for stage in blocks for part in parts_of(stage.layer))
    return {part.weight: part for part in parts if isinstance(part, Linear)}


def parts_of(layer: Layer) -> Iterator[Layer]:
    """Yield the layer, or the innermost layers of which it consists."""
    if isinstance(layer, Composite):
        for part in layer.parts():
            yield from parts_of(part)
    else:
        yield layer
