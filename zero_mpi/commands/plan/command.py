"""`zero-mpi plan`: read the flags, plan, print; `--json` writes the same numbers to a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zero_mpi.cli.text import write
from zero_mpi.commands.plan.flags import Question, read
from zero_mpi.errors import UsageError
from zero_mpi.files.atomic import write_json
from zero_mpi.files.open import check_target
from zero_mpi.launch.world import World
from zero_mpi.launch.world import run as launch
from zero_mpi.plan.plan import make_plan
from zero_mpi.plan.report import ask_lines, head, introduction, report, sweep_lines
from zero_mpi.plan.resident import resident
from zero_mpi.plan.scaling import limits, sweep


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the plan. Returns the exit status."""
    try:
        question = read(arguments)
        lines, numbers = sweeps(question) if question.sweeps else plans(question)
    except MemoryError as error:  # units' buffers are set aside, though never touched
        raise UsageError("a single unit of this model is larger than the memory of this machine") from error
    if question.json is not None:
        check_target("--json", question.json)
    write(lines)
    if question.json is not None:
        write_json("--json", question.json, numbers | {"machine": asdict(question.machine)})
    return 0


def plans(question: Question) -> tuple[list[str], dict[str, Any]]:
    """Every case of a question as text and as numbers."""
    made = [make_plan(case, question.machine) for case in question.cases]
    case = question.cases[0]
    asked = [resident(plan.case, plan.memory, question.text, question.sample) for plan in made]
    tables = [
        plan.as_json() | {"node": asdict(node) | {"total": node.total, "ask": node.ask}}
        for plan, node in zip(made, asked, strict=True)
    ]
    numbers = {"ranks": case.ranks, "nodes": case.nodes, "plans": tables}
    title = head("memory of a node's host", made)
    return [*report(made, question.machine, question.known), "", title, *ask_lines(asked)], numbers


def sweeps(question: Question) -> tuple[list[str], dict[str, Any]]:
    """The sweep of every case."""
    lines = list(introduction(question.cases[0], question.machine, question.known))
    numbers: dict[str, Any] = {}
    for case in question.cases:
        points = sweep(case, question.machine, question.per_node, question.most_ranks)
        reasons = limits(case, points)
        lines += ["", *sweep_lines(case, points, reasons)]
        numbers[case.strategy_name] = {"points": [asdict(point) for point in points], "limits": reasons}
    return lines, {"ranks_per_node": question.per_node, "sweep": numbers}


def main() -> None:
    """Entry point."""
    launch("plan", command, sys.argv[1:], alone=True, instead="leave mpirun out, and say --ranks N")
