"""zero_mpi: trains transformers over MPI ranks, sharded and bit-exact, and saves them as GGUF.

Importing it starts neither MPI nor CUDA. The names below are loaded at their first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_mpi import environment
from zero_mpi.commands.old_form import OldForms
from zero_mpi.environment import portable

sys.meta_path.append(OldForms)
environment.prepare()  # before numpy is imported and MPI starts
portable.prepare()

__version__ = "0.2.0"

if TYPE_CHECKING:
    from zero_mpi.checkpoint.saver import load, save
    from zero_mpi.comm import Comm, Partition, SerialComm
    from zero_mpi.comm.nodes.hybrid import MPIComm
    from zero_mpi.compat.accumulation import GradAccum
    from zero_mpi.compat.module import DDP, ShardedLinear, ShardedModule, ShardInfo
    from zero_mpi.compat.optimizer import ShardedAdamW, ShardedOptimizer, clip_grad_norm
    from zero_mpi.errors import UsageError
    from zero_mpi.launch.connect import connect
    from zero_mpi.nn import cross_entropy
    from zero_mpi.optim.muon import Muon
    from zero_mpi.optim.rule import AdamW, Part, Rule
    from zero_mpi.sharding.strategy import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, Strategy
    from zero_mpi.train.timeline import tracing

MODULES = {
    "checkpoint.saver": ("load", "save"),
    "comm": ("Comm", "Partition", "SerialComm"),
    "comm.nodes.hybrid": ("MPIComm",),
    "errors": ("UsageError",),
    "launch.connect": ("connect",),
    "nn": ("cross_entropy",),
    "compat.accumulation": ("GradAccum",),
    "compat.module": ("DDP", "ShardInfo", "ShardedLinear", "ShardedModule"),
    "compat.optimizer": ("ShardedAdamW", "ShardedOptimizer", "clip_grad_norm"),
    "optim.muon": ("Muon",),
    "optim.rule": ("AdamW", "Part", "Rule"),
    "sharding.strategy": ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "SHARD_GRAD_OP", "Strategy"),
    "train.timeline": ("tracing",),
}
PUBLIC = {name: module for module, names in MODULES.items() for name in names}

__all__ = [
    "DDP",
    "FULL_SHARD",
    "HYBRID_SHARD",
    "NO_SHARD",
    "SHARD_GRAD_OP",
    "AdamW",
    "Comm",
    "GradAccum",
    "MPIComm",
    "Muon",
    "Part",
    "Partition",
    "Rule",
    "SerialComm",
    "ShardInfo",
    "ShardedAdamW",
    "ShardedLinear",
    "ShardedModule",
    "ShardedOptimizer",
    "Strategy",
    "UsageError",
    "clip_grad_norm",
    "connect",
    "cross_entropy",
    "load",
    "save",
    "tracing",
]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'zero_mpi' has no attribute {name!r}")
    return getattr(import_module(f"zero_mpi.{PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
