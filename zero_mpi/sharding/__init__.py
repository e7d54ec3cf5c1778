"""Sharding: units that travel together, the strategies, and the module that runs a model over ranks."""

from zero_mpi.sharding.ddp import DDP
from zero_mpi.sharding.linear import ShardedLinear
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.strategy import (
    FULL_SHARD,
    HYBRID_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    STRATEGIES,
    Strategy,
    strategy_named,
)
from zero_mpi.sharding.unit import ShardInfo, Unit

__all__ = [
    "DDP",
    "FULL_SHARD",
    "HYBRID_SHARD",
    "NO_SHARD",
    "SHARD_GRAD_OP",
    "STRATEGIES",
    "ShardInfo",
    "ShardedLinear",
    "ShardedModule",
    "Strategy",
    "Unit",
    "strategy_named",
]
