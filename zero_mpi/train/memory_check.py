"""Checks that there is memory for a run, before anything large is allocated.

The memory planned for the ranks of each node is compared with what the system allows them: by a control
group, by limits of a process, by free memory. A run that exceeds one of them is killed without a message,
minutes later. The first two are compared with what is still to be allocated: interpreters and libraries are
loaded already. Space in /dev/shm is checked where it is taken (`comm.shared.memory`): without it a run uses
messages.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path

from zero_mpi import device
from zero_mpi.cli.text import size
from zero_mpi.comm import kinds
from zero_mpi.config.settings import Config
from zero_mpi.environment.limits import Limits, read_limits
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.models.model_config import elements
from zero_mpi.plan.case import check_sums, make_case
from zero_mpi.plan.rank_memory import plan_memory, private, text_bytes

STATE = 16  # bytes of a parameter with its gradient and two moments
REMEDIES = "more nodes, a smaller model or --micro-batch, --recompute or --strategy full-shard"
ASK = "request more (Slurm: --mem, containers: --memory)"


@dataclass(frozen=True)
class NodeInfo:
    """Memory of a host: its name, its ranks, the limit of all and of each, and what each uses now."""

    name: str
    ranks: int
    limits: Limits
    mapped: int
    written: int


def nodes_of(world: World) -> list[NodeInfo]:
    """Return the memory of all nodes, on all ranks. Collective."""
    host = None
    if world.node.rank == 0:
        host = NodeInfo(platform.node(), world.node.size, read_limits(), status("VmSize"), status("VmData"))
    return [node for node in world.comm.allgather_object(host) if node is not None]


def status(name: str) -> int:
    """Return the bytes that the system reports for this process under `name`."""
    line = re.search(rf"^{name}:\s+([0-9]+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(line[1]) << 10 if line else 0


def find_problem(nodes: list[NodeInfo], config: Config, model: ModelConfig, ranks: int) -> str:
    """Return why some node lacks memory for the run, or an empty text."""
    if device.in_use().name != "cpu":
        return ""  # the planned memory lies on the GPU, which reports itself when it is full
    least = STATE * elements(model) // len(nodes)  # bytes of a node, however the model is sharded
    for node in nodes:
        if not config.frozen and least > node.limits.memory:
            return refusal(node, model, "parameters, gradients and moments", least)
    # As many ranks on each node as the fullest node has.
    whole = len(nodes) if ranks % len(nodes) == 0 else 1
    case = make_case(replace(config, device="cpu"), model, ranks, whole)
    case = replace(case, transport_wanted=kinds.SERIAL) if ranks == 1 else case
    check_sums(case)
    memory, text = plan_memory(case), text_bytes(config, model)  # computed once: nodes may be thousands
    for node in nodes:
        problem = node_problem(node, model, private(case, memory), text, memory.node_shared)
        if problem:
            return problem
    return ""


def node_problem(node: NodeInfo, model: ModelConfig, arrays: int, text: int, shared: int) -> str:
    """Return why this node lacks memory, or an empty text.

    arrays and text: bytes that each rank takes; shared: further bytes that its node takes
    """
    needed = node.ranks * (arrays + text) + shared
    if needed > node.limits.memory:
        return refusal(node, model, f"arrays and text of {node.ranks} rank(s)", needed)
    limits: list[tuple[str, str, int | None, int]] = [
        ("address space", "-v", node.limits.address_space, node.mapped + arrays + text + shared),
        ("private memory", "-d", node.limits.data, node.written + arrays + text),
    ]
    for what, option, limit, each in limits:
        if limit is not None and each > limit:
            return (
                f"not enough memory: a rank on {node.name} needs about {size(each)} of {what}, but ulimit "
                f"{option} allows {size(limit)}: put ulimit {option} unlimited into the job script, or use "
                f"{REMEDIES}"
            )
    return ""


def refusal(node: NodeInfo, model: ModelConfig, what: str, needed: int) -> str:
    """Return one line: what is planned, what is allowed, and the remedy."""
    limits = node.limits
    by_group = limits.group_free is not None and limits.group_free <= limits.available
    by = f"its control group has {size(limits.memory)} left of {size(limits.group_memory or 0)}"
    allowed = by if by_group else f"{size(limits.memory)} are free"
    return (
        f"not enough memory: {what} need about {size(needed)} on {node.name} ({elements(model):,} "
        f"parameters), but {allowed}: {ASK}, or use {REMEDIES}"
    )
