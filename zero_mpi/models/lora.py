"""Which projections of a model have adapters (`nn.low_rank`), and of what rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zero_mpi.errors import UsageError
from zero_mpi.nn import Layer, Linear, Stage
from zero_mpi.nn.layer import Composite
from zero_mpi.nn.low_rank import FIRST, SECOND
from zero_mpi.ops.block_kinds import BlockKind

TARGETS = ("blk.*.attn_*.weight", "blk.*.ffn_*.weight")  # all projections of attention and feed-forward
FROZEN = ("*[!ab]",)  # every name but those that end in lora_a and lora_b


@dataclass(frozen=True)
class LoRA:
    """Adapters of a rank for the weights that patterns name; their products count alpha / rank times.

    stored: names and types of what is beside them and stays in the blocks of its file
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    stored: tuple[tuple[str, BlockKind], ...] = ()

    def adapt(self, stages: list[Stage]) -> list[Stage]:
        """The stages, their projections with adapters; raises UsageError for a pattern that names none."""
        found = {linear.weight: linear for stage in blocks(stages) for linear in linears(stage.layer)}
        for pattern in self.targets:
            if not any(fnmatchcase(name, pattern) for name in found):
                raise UsageError(
                    f"--lora-targets {pattern}: names no projection of a block; they are called "
                    f"{', '.join(list(found)[:3])}, ..."
                )
        for name, linear in found.items():
            if any(fnmatchcase(name, pattern) for pattern in self.targets):
                linear.adapt(self.rank, self.alpha / self.rank)
        return stages


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return name.endswith((FIRST, SECOND))


def blocks(stages: Sequence[Stage]) -> Iterator[Stage]:
    """The stages between embedding and head."""
    return (stage for stage in stages if stage.scope.startswith("blk."))


def linears(layer: Layer) -> Iterator[Linear]:
    """The linear layers that a layer is made of."""
    if isinstance(layer, Linear):
        yield layer
    elif isinstance(layer, Composite):
        for part in layer.parts():
            yield from linears(part)
