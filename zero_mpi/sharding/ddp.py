"""DDP: replicated parameters, gradients reduced in buckets while backward goes on."""

from __future__ import annotations

from collections.abc import Sequence

from zero_mpi.arguments import whole
from zero_mpi.comm import Comm
from zero_mpi.comm.agree import agreed
from zero_mpi.nn.layer import Stage
from zero_mpi.sharding.layout import BUCKET_MB
from zero_mpi.sharding.module import ShardedModule
from zero_mpi.sharding.strategy import NO_SHARD


class DDP(ShardedModule):
    """`ShardedModule` under NO_SHARD; buckets of `bucket_mb` MiB are filled in reverse order.

    Li et al., "PyTorch Distributed", 2020, for the idea of buckets.
    """

    def __init__(
        self, stages: Sequence[Stage], comm: Comm, *, bucket_mb: float = BUCKET_MB, frozen: Sequence[str] = ()
    ) -> None:
        super().__init__(stages, comm, NO_SHARD, bucket_mb=bucket_mb, frozen=frozen)

    def broadcast_parameters(self, root: int = 0) -> None:
        """Give every rank the parameters of `root`. Collective; ValueError if that is no rank or differs."""
        what, size = "broadcast_parameters", self.comm.size
        root = agreed(self.comm, what, lambda: (whole(f"{what}: root", root, 0, size), {"root": root}))
        handles = [
            self.comm.broadcast(unit.parameters.kept[0], root, f"parameters {unit.name}")
            for unit in self.units
        ]
        for unit, handle in zip(self.units, handles, strict=True):
            handle.wait()
            unit.parameters.round()
        self.unfilled.clear()
