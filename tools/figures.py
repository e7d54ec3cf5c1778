#!/usr/bin/env python3
"""Draw the pictures of docs/{strategies,exact,moe}.md and ARCHITECTURE.md from the code that they explain.

    python tools/figures.py [FOLDER]

Units, slices, schedules, rounds and bytes are not drawn by hand: they come from the layout, the schedule and
the planner of the package, mostly for the model that `zero_mpi.train` trains without flags. The files go to
docs/images by default; a test draws them again and compares. figures_time.py draws the pictures of schedules
and sums, figures_packages.py the picture of imports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from svg import MARGIN, Picture

from zero_mpi.comm import Partition
from zero_mpi.config.inputs import model_from_flags
from zero_mpi.config.settings import Config
from zero_mpi.data import ByteTokenizer
from zero_mpi.models import ModelConfig
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import Memory, plan_memory
from zero_mpi.plan.traffic import plan_traffic
from zero_mpi.sharding.strategy import STRATEGIES
from zero_mpi.sharding.unit import Unit

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, RANKS, NODES = 960, 4, 2
MIB = 2**20
KINDS = ("parameters", "gradients", "first moment", "second moment")


def default_model() -> ModelConfig:
    """Return the model that `zero_mpi.train` trains without flags."""
    return model_from_flags(Config(), ByteTokenizer())


def case(strategy: str, **others: Any) -> Case:
    """Return a case of the planner: the default model on four ranks, with one micro-batch per rank."""
    return Case(default_model(), ranks=RANKS, batch_size=2 * RANKS, strategy_name=strategy, **others)


def rank_legend(picture: Picture, x: float, y: float, ranks: int = RANKS) -> None:
    """Draw a legend with the colour of each rank."""
    for rank in range(ranks):
        picture.box(x + 82 * rank, y - 10, 12, 12, f"rank{rank}")
        picture.text(x + 82 * rank + 18, y, f"rank {rank}", "dim")


# --------------------------------------------------------------------------------------- units, slices


def slices(picture: Picture, partition: Partition, x: float, y: float, scale: float, height: float) -> None:
    """Draw a flat buffer as its slices, each in the colour of the rank that owns it."""
    for rank in range(partition.parts):
        part = partition.part(rank)
        if part.start < part.stop:
            width = (part.stop - part.start) * scale
            picture.box(x + part.start * scale, y, max(width - 1.5, 0.5), height, f"rank{rank}")


def units() -> str:
    """Draw each unit of the model as a bar with its slices, and one block magnified."""
    layout = case("full-shard").layout
    picture = Picture(
        WIDTH,
        "Units and slices: the default model on 4 ranks",
        "Six units as bars, each cut into four slices; the first block magnified, with its parameters.",
    )
    picture.text(
        MARGIN,
        62,
        "Each bar is a unit: a flat buffer that is gathered as one. Colours show the owners.",
        "dim",
    )
    rank_legend(picture, WIDTH - MARGIN - 320, 38)
    left, longest = 130, max(unit.length for unit in layout.units)
    scale = (WIDTH - left - 190) / longest
    for row, unit in enumerate(layout.units):
        y = 84 + 32 * row
        picture.text(MARGIN, y + 16, unit.name, "ink bold")
        slices(picture, unit.partition(RANKS), left, y, scale, 22)
        own = unit.partition(RANKS).counts
        kept = f"{own[0]:,}" if len(set(own)) == 1 else f"{min(own):,} to {max(own):,}"
        picture.text(WIDTH - MARGIN, y + 9, f"{unit.length:,} elements", "ink small end")
        picture.text(WIDTH - MARGIN, y + 23, f"{kept} per rank", "dim small end")
    near(picture, layout.units[1], 84 + 32 * len(layout.units) + 46)
    return picture.done(84 + 32 * len(layout.units) + 202)


def near(picture: Picture, unit: Unit, top: float) -> None:
    """Draw a unit magnified, with its parameters above its slices."""
    picture.text(MARGIN, top, f"{unit.name} magnified", "ink bold")
    picture.text(MARGIN + 130, top, "a slice may end inside a parameter", "dim")
    scale = (WIDTH - 2 * MARGIN) / unit.length
    for name, param in unit.params.items():
        x, width = MARGIN + unit.offsets[name] * scale, param.size * scale
        picture.box(x, top + 36, max(width - 1.5, 1.5), 30, "faint", edge="edge")
        short = name.removeprefix(f"{unit.name}.").removesuffix(".weight")
        if width > 40:
            picture.text(x + width / 2, top + 56, short, "ink small mid")
        else:
            picture.text(max(x, MARGIN), top + 26, short, "dim small")
            picture.line([(x + 1, top + 29), (x + 1, top + 36)], "dim")
    slices(picture, unit.partition(RANKS), MARGIN, top + 78, scale, 30)
    for rank in range(RANKS):
        part = unit.partition(RANKS).part(rank)
        middle = MARGIN + (part.start + part.stop) / 2 * scale
        picture.text(middle, top + 98, f"rank {rank}: {part.stop - part.start:,}", "on small mid")
    picture.text(
        MARGIN,
        top + 130,
        f"Slices end, and parameters begin, at multiples of {unit.quantum:,} elements.",
        "dim",
    )


# -------------------------------------------------------------------------------------------- what is kept


def held(of: Case, kind: str, rank: int) -> list[int]:
    """Return the owners of the slices of `kind` that a rank keeps from step to step."""
    strategy = of.strategy
    own = [rank % of.owners]
    whole = list(range(of.owners))
    if kind == "parameters":
        return own if strategy.shards_parameters else whole
    return own if strategy.shards_moments else whole


def kept() -> str:
    """Draw, for each strategy, which parameters, gradients and moments a rank keeps."""
    picture = Picture(
        WIDTH,
        "What each rank keeps from step to step",
        "For each strategy, the slices that four ranks on two nodes hold.",
    )
    picture.text(
        MARGIN,
        62,
        "The default model on 2 nodes of 2 ranks, messages only. A filled cell is a slice that is kept.",
        "dim",
    )
    for row, name in enumerate(STRATEGIES):
        of = case(name, nodes=NODES, transport_wanted="mpi")
        top = 96 + 126 * row
        picture.text(MARGIN, top + 14, name, "ink bold")
        memory = plan_memory(of)
        state = memory.parameters + memory.masters + memory.gradients + memory.moments
        picture.text(MARGIN, top + 36, f"{state / MIB:.1f} MiB per rank", "ink")
        picture.text(MARGIN, top + 54, state_in_words(memory), "dim small")
        for rank in range(RANKS):
            x = 290 + 166 * rank
            picture.text(x, top + 4, f"rank {rank}", "dim small")
            for line, kind in enumerate(KINDS):
                strip(picture, of.owners, held(of, kind, rank), x, top + 10 + 23 * line)
                if rank == 0:
                    picture.text(x - 10, top + 24 + 23 * line, kind, "dim small end")
        if row:
            picture.line([(MARGIN, top - 22), (WIDTH - MARGIN, top - 22)], "edge")
    return picture.done(96 + 126 * len(STRATEGIES) - 6)


def state_in_words(memory: Memory) -> str:
    """Return a text with the MiB of parameters, gradients and moments."""
    parts = (memory.parameters, memory.gradients, memory.moments)
    return " + ".join(f"{part / MIB:.1f}" for part in parts)


def strip(picture: Picture, owners: int, there: list[int], x: float, y: float) -> None:
    """Draw a row of cells, one for each slice. `there`: the filled cells."""
    width = 140 / owners
    for owner in range(owners):
        kind = f"rank{owner}" if owner in there else "faint"
        picture.box(x + width * owner, y, width - 2, 18, kind, edge="" if owner in there else "edge")


# ---------------------------------------------------------------------------------------------- traffic


def traffic() -> str:
    """Draw the bytes that a step sends inside and between nodes, for each strategy and two transports."""
    picture = Picture(
        WIDTH,
        "MiB that all ranks send in a step",
        "Bars: the MiB of a step, inside nodes and between them.",
    )
    picture.text(
        MARGIN,
        62,
        "The default model on 2 nodes of 2 ranks, one micro-batch per rank: sum of all ranks in MiB.",
        "dim",
    )
    rows = [(name, wanted) for name in STRATEGIES for wanted in ("auto", "mpi")]
    sums = [plan_traffic(case(name, nodes=NODES, transport_wanted=wanted)) for name, wanted in rows]
    scale = (WIDTH - 300 - 70) / max(float((each.inside + each.between).sum()) for each in sums)
    for (kind, label), x in zip(
        (("sum", "between nodes"), ("there", "inside a node (read or sent)")),
        (MARGIN, MARGIN + 140),
        strict=True,
    ):
        picture.box(x, 78, 12, 12, kind)
        picture.text(x + 18, 88, label, "dim")
    for row, ((name, wanted), each) in enumerate(zip(rows, sums, strict=True)):
        y = 112 + 29 * row + 14 * (row // 2)
        if wanted == "auto":
            picture.text(MARGIN, y + 15, name, "ink bold")
        picture.text(
            288, y + 15, "memory shared in nodes" if wanted == "auto" else "messages only", "dim small end"
        )
        between, inside = float(each.between.sum()), float(each.inside.sum())
        picture.box(300, y, between * scale, 21, "sum")
        picture.box(300 + between * scale + 1.5, y, max(inside * scale - 1.5, 0), 21, "there")
        picture.text(306, y + 15, f"{between / MIB:.1f}", "on small")
        if inside:
            picture.text(306 + between * scale, y + 15, f"{inside / MIB:.1f}", "ink small")
    return picture.done(112 + 29 * len(rows) + 14 * len(STRATEGIES) + 6)


def pictures() -> dict[str, Callable[[], str]]:
    """Return name of a file -> function that draws its picture."""
    import figures_packages
    import figures_time

    own = {"units.svg": units, "kept.svg": kept, "traffic.svg": traffic}
    return own | {"packages.svg": figures_packages.packages} | figures_time.PICTURES


def main() -> None:
    """Write all pictures into the folder that the command line names, or docs/images."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in pictures().items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
