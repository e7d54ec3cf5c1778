"""Sharding strategies: whether parameters and optimizer moments are sharded.

FULL_SHARD is ZeRO stage 3, SHARD_GRAD_OP is stage 2 (Rajbhandari et al., 2020), NO_SHARD is data-parallel
training with replicated state (DDP). HYBRID_SHARD is FULL_SHARD within each node, replicated between nodes
(Zhao et al., "PyTorch FSDP", 2023): parameters are gathered only inside a node, which must hold them all.
"""

from dataclasses import dataclass

from zero_mpi.errors import UsageError


@dataclass(frozen=True)
class Strategy:
    """Sharding strategy, as four choices. Gradients are reduced into slices, except by NO_SHARD with fast.

    shards_parameters  parameters are sharded, and gathered around each use
    shards_moments     a rank updates only its slice; otherwise it gathers gradients and updates everything
    buckets            units are cut by bytes in reverse order, not by the model's scopes
    within_nodes       slices are divided among the ranks of each node, not among all ranks
    """

    name: str
    shards_parameters: bool
    shards_moments: bool
    buckets: bool
    within_nodes: bool = False

    def __post_init__(self) -> None:
        if self.shards_parameters and not self.shards_moments:
            raise ValueError(f"Strategy {self.name}: shards_parameters needs shards_moments")
        if self.within_nodes and not self.shards_parameters:
            raise ValueError(f"Strategy {self.name}: within_nodes needs shards_parameters")


FULL_SHARD = Strategy("full-shard", shards_parameters=True, shards_moments=True, buckets=False)
SHARD_GRAD_OP = Strategy("shard-grad-op", shards_parameters=False, shards_moments=True, buckets=False)
NO_SHARD = Strategy("no-shard", shards_parameters=False, shards_moments=False, buckets=True)
HYBRID_SHARD = Strategy(
    "hybrid-shard", shards_parameters=True, shards_moments=True, buckets=False, within_nodes=True
)

STRATEGIES = {strategy.name: strategy for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD)}


def strategy_named(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise UsageError(f"strategy {name!r} is not known; expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
