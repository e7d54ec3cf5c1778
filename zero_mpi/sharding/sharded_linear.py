"""A single linear layer, sharded by rows: gather, multiply, drop at once, gather again in backward.

For models that are written by hand, layer by layer: the smallest memory that sharding can give.
"""

from __future__ import annotations

from typing import Any

from zero_mpi.arguments import instance, whole
from zero_mpi.comm import Comm
from zero_mpi.nn.layer import Stage
from zero_mpi.nn.linear import Linear
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.strategy import FULL_SHARD


class ShardedLinear(ShardedModule):
    """y (..., O) = x (..., C) W^T + b with the O rows of W, and b, dealt out over ranks, also unevenly.

    Parameters `NAME.weight` (O, C) and `NAME.bias` (O,). `forward` and `backward` as in ShardedModule, but
    between the two nothing is gathered; `backward` returns dx.
    """

    def __init__(
        self, comm: Comm, inputs: int, outputs: int, *, bias: bool = True, name: str = "linear"
    ) -> None:
        instance("ShardedLinear: name", name, str, "a text")
        inputs, outputs = (whole("ShardedLinear: inputs and outputs", n, least=1) for n in (inputs, outputs))
        layer = Linear(name, inputs, outputs, bias=bias)
        super().__init__([Stage(name, layer)], comm, FULL_SHARD, prefetch=0, by_rows=True)

    def forward(self, x: Any, training: bool | None = None) -> Any:
        """Return the output y for x; drop the gathered rows at once."""
        y = super().forward(x, training)
        for unit in self.units:
            unit.release()
        return y

    def backward(self, dy: Any, *, contributors: int | None = None, last: bool = True) -> Any:
        """Return the gradient dx; gather the rows again and start the reduction of their gradients."""
        for unit in self.units:
            unit.start_gather()
        return super().backward(dy, contributors=contributors, last=last)
