"""Sharding: units that travel together, the strategies, and the module that runs a model over ranks.

`layout` cuts a model into units, `schedule` makes the lists of actions, and `actions.run` follows them.
`sharded_unit` is a unit at run time: its parameters (`parameters`) and its gradients (`gradients`), each with
one class for every way to keep them. `module` joins all of it, `passes` takes a micro-batch through the
stages, `optimizer` updates slices, `grad_accum` deals micro-batches out to ranks, `evaluation` without
gradients.

Units. A unit is the parameters of one scope (`token_embd`, `blk.3`, `output`) in one flat buffer, or under
`no-shard` a bucket of bytes filled in reverse order. Frozen parameters of a scope form a separate unit, which
needs no gradient. A tied head has the embedding's scope, so it is in the same unit. In its unit each
parameter starts at a multiple of 1024 elements, and slices end at such multiples (with row sharding: at
rows). A slice may be empty. The gaps are zeros and stay zeros.

Exactness. docs/exact.md lists what could move bits and what is done about it. In the code: the owner adds
slices in rank order (`device.ordered_sum`). The norm is made of float64 sums of squares over chunks
of 1024 elements, each inside one slice. They are put into a zeroed vector in the model's order, which an
allreduce completes: it adds zeros to them, which is exact. The losses of the micro-batches travel in the same
way. First weights are drawn by (seed, parameter, block) from a counter-based generator (`init_weights`).
Losses are divided by the tokens of the whole step before backward, so gradients are sums and nothing is
divided by the number of ranks.

Precision. Slices, moments and summed gradients are float32 always. With bfloat16 or float16 a rank keeps a
rounded copy of its slice, which is what is gathered and computed with; AdamW writes both in one pass.
Gradients travel in the low type unless told otherwise and are widened before they are added, so the bits do
not depend on the number of ranks here either. In float16 the loss is multiplied by a power of two
(`loss_scale`), which is part of a checkpoint.
"""

from zero_mpi.sharding.ddp import DDP
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.sharded_linear import ShardedLinear
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
