"""Whether there is memory for a run, asked before anything large is made.

What is planned for the ranks of each node is compared with what the system says they can have: by a control
group, by limits of a process, by the memory that is free. A run that passes one of them is killed without a
word, minutes later. What is compared with the first two is what is still to come; interpreters and libraries
are there already. Room in /dev/shm is looked at where it is taken (`comm.shared.window`), for without it a
run goes by messages.
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
from zero_mpi.launch.limits import Limits, look
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.models.model_config import elements
from zero_mpi.plan.case import Case, check_sums, make_case
from zero_mpi.plan.rank_memory import plan_memory, private, text_bytes

STATE = 16  # bytes of a parameter with its gradient and two moments
REMEDIES = "more nodes, a smaller model or --micro-batch, --recompute, --strategy full-shard"
ASK = "ask for more (Slurm: --mem, containers: --memory)"


@dataclass(frozen=True)
class NodeRoom:
    """A host: its name, its ranks, what they can have together and each, what each has now."""

    name: str
    ranks: int
    limits: Limits
    mapped: int
    written: int


def nodes_of(world: World) -> list[NodeRoom]:
    """All nodes, on all ranks. Collective."""
    room = None
    if world.node.rank == 0:
        room = NodeRoom(platform.node(), world.node.size, look(), status("VmSize"), status("VmData"))
    return [node for node in world.comm.allgather_object(room) if node is not None]


def status(name: str) -> int:
    """Bytes that the system notes of this process."""
    line = re.search(rf"^{name}:\s+([0-9]+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(line[1]) << 10 if line else 0


def find_problem(nodes: list[NodeRoom], config: Config, model: ModelConfig, ranks: int) -> str:
    """Why some node has no room for the run, or an empty text."""
    if device.in_use().name != "cpu":
        return ""  # what the plan counts lies on the GPU, which says itself when it is full
    least = STATE * elements(model) // len(nodes)  # of a node, however the model is dealt out
    for node in nodes:
        if not config.frozen and least > node.limits.memory:
            return refusal(node, model, "parameters, gradients and moments alone", least)
    case = case_of(config, model, ranks, len(nodes))
    check_sums(case)
    memory, text = plan_memory(case), text_bytes(config, model)  # once: nodes may be thousands
    for node in nodes:
        problem = node_problem(node, model, private(case, memory), text, memory.node_shared)
        if problem:
            return problem
    return ""


def case_of(config: Config, model: ModelConfig, ranks: int, nodes: int) -> Case:
    """The plan's question, on as many ranks of each node as of the fullest."""
    whole = nodes if ranks % nodes == 0 else 1
    case = make_case(replace(config, device="cpu"), model, ranks, whole)
    return replace(case, transport_wanted=kinds.SERIAL) if ranks == 1 else case


def node_problem(node: NodeRoom, model: ModelConfig, arrays: int, text: int, shared: int) -> str:
    """Why this node has no room, or an empty text.

    arrays and text: bytes that each rank takes; shared: those that its node takes beside them
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
                f"no memory for this run: a rank on {node.name} is planned to take {size(each)} of {what}, "
                f"and ulimit {option} allows {size(limit)}: say ulimit {option} unlimited in the job script, "
                f"or take {REMEDIES}"
            )
    return ""


def refusal(node: NodeRoom, model: ModelConfig, what: str, needed: int) -> str:
    """One line: what is planned, what is allowed, the remedy."""
    limits = node.limits
    by_group = limits.group_room is not None and limits.group_room <= limits.available
    by = f"its control group has {size(limits.memory)} left of {size(limits.group_memory or 0)}"
    allowed = by if by_group else f"{size(limits.memory)} are free there"
    return (
        f"no memory for this run: {what} are planned to take {size(needed)} on {node.name} ("
        f"{elements(model):,} parameters), and {allowed}: {ASK}, or take {REMEDIES}"
    )
