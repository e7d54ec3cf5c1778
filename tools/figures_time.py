"""Draws pictures of a step: when units are gathered and reduced, and the paths and order of sums.

The columns of a schedule are its stages and turns, with the actions that `ShardedModule` runs. The numbers of
elements in boxes come from `zero_mpi.plan.traffic`, and `Rounds` determines the positions of
micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from svg import MARGIN, Picture

from zero_mpi.comm import Partition
from zero_mpi.config.inputs import model_from_flags
from zero_mpi.config.settings import Config
from zero_mpi.data import ByteTokenizer
from zero_mpi.device.types import Array
from zero_mpi.plan.case import Case
from zero_mpi.plan.traffic import Lanes
from zero_mpi.sharding.actions import (
    Actions,
    Backward,
    Forward,
    Gather,
    Reduce,
    Release,
    StageAction,
    Turn,
    Wait,
    WaitReduce,
    by_stage,
)
from zero_mpi.sharding.layout import Layout
from zero_mpi.sharding.rounds import Rounds

WIDTH, LEFT, CELL, HIGH = 960, 150, 57, 30
TOP = 150


# -------------------------------------------------------------------------------------------- schedules


@dataclass(frozen=True)
class Span:
    """Columns [start, stop) in which a unit is being gathered, present, used by a stage, or being reduced."""

    unit: int
    start: float
    stop: float


@dataclass(frozen=True)
class Story:
    """Activities of a step, by column. Columns: stages and turns of forward, of backward, then the update."""

    columns: list[str]
    ahead: int  # number of columns of forward
    coming: list[Span]  # gathers in progress
    there: list[Span]  # units with full parameters on the rank
    work: list[Span]  # a stage computes with the unit
    sums: list[Span]  # reductions in progress


def story(layout: Layout, names: list[str]) -> Story:
    """Return the activities of a step with one micro-batch per rank, as `ShardedModule` runs them."""
    schedule, ahead = layout.schedule, [*by_stage(layout.schedule.forward)]
    columns = [*ahead, *by_stage(schedule.backward)]
    opened, whole, reduced = dict[int, float](), dict[int, float](), dict[int, float]()
    coming, there, work, sums = list[Span](), list[Span](), list[Span](), list[Span]()
    for column, action in ((column, action) for column, actions in enumerate(columns) for action in actions):
        match action:
            case Gather(unit):
                opened[unit] = column
            case Wait(unit) if unit in opened:
                coming.append(Span(unit, opened.pop(unit), column))
                whole[unit] = column
            case Release(unit):
                there.append(Span(unit, whole.pop(unit), column + 1))
            case Forward(stage) | Backward(stage):
                work += [Span(unit, column, column + 1) for unit in dict.fromkeys(layout.uses[stage])]
            case Turn(stage, number):
                work += [Span(unit, column, column + 1) for unit in layout.parts[stage].units[number]]
            case WaitReduce(unit) if unit in reduced:
                sums.append(Span(unit, reduced.pop(unit), column + 1))
            case Reduce(unit):
                reduced[unit] = column + 1
    sums += [Span(unit, since, len(columns) + 0.5) for unit, since in reduced.items()]
    if not any(isinstance(action, Gather) for action in schedule.forward):
        there = [Span(unit, 0, len(columns) + 1) for unit in range(len(layout.units))]
    labels = [label(layout, actions, names) for actions in columns]
    return Story([*labels, "update"], len(ahead), coming, there, work, sums)


def label(layout: Layout, actions: Actions, names: list[str]) -> str:
    """Return a column's name: its stage, or the range of the part of a unit that a turn gathers."""
    action = next(action for action in actions if isinstance(action, StageAction))
    if not isinstance(action, Turn):
        return names[action.stage]
    members = layout.parts[action.stage].members[action.number]
    return f"[{members.start}:{members.stop}]"


def draw_story(
    title: str,
    about: str,
    layout: Layout,
    names: list[str],
    *,
    gathers: bool = False,
    after: str = "",
    later: bool = False,
) -> str:
    """Draw a schedule, with a row per unit and a column per stage or turn.

    `after`: label of a gather that follows all sums, or ""; `later`: it may extend into the next step.
    """
    got = story(layout, names)
    picture = Picture(WIDTH, title, about)
    picture.text(MARGIN, 62, about, "dim")
    legend(picture, gathers, after)
    units, end = layout.units, len(got.columns) - 1
    bottom = TOP + HIGH * len(units)
    heads(picture, got.columns, got.ahead, bottom)
    for row, unit in enumerate(units):
        picture.text(MARGIN, TOP + HIGH * row + 20, unit.name, "ink bold")
    for kind, spans in (("there", got.there), ("work", got.work)):
        for span in spans:
            place(picture, span, kind)
    for span in got.coming:
        arrow(picture, span, "coming")
    for span in got.sums:
        arrow(picture, span, "sum")
    if after:
        for row in range(len(units)):
            arrow(picture, Span(row, end + 0.5, end + (1.35 if later else 0.98)), "coming")
    return picture.done(bottom + 24)


def legend(picture: Picture, gathers: bool, after: str) -> None:
    """Draw a legend of the marks in a schedule."""
    x = float(MARGIN)
    marks = [
        ("work", "a stage uses the unit"),
        ("there", "gathered on this rank"),
        ("sum", "its gradient is reduced"),
    ]
    if gathers or after:
        marks.insert(0, ("coming", after or "it is gathered"))
    for kind, label in marks:
        if kind in ("coming", "sum"):
            picture.arrow((x, 84), (x + 26, 84), kind)
        else:
            picture.box(x, 76, 26, 16, kind)
        picture.text(x + 34, 89, label, "dim")
        x += 34 + 6.9 * len(label) + 22


def heads(picture: Picture, columns: list[str], ahead: int, bottom: float) -> None:
    """Draw the names of stages above the columns, and lines between columns; `ahead`: forward's columns."""
    end = len(columns) - 1
    for start, stop, name in ((0, ahead, "forward"), (ahead, end, "backward")):
        picture.text(LEFT + CELL * (start + stop) / 2, TOP - 30, name, "ink bold mid")
    for column, name in enumerate(columns):
        short = name.removeprefix("token_").removeprefix("output_")
        picture.text(LEFT + CELL * (column + 0.5), TOP - 10, short, "dim small mid")
    for column in range(len(columns) + 1):
        x = LEFT + CELL * column
        picture.line([(x, TOP - (40 if column in (0, ahead, end) else 2)), (x, bottom)], "edge")


def place(picture: Picture, span: Span, kind: str) -> None:
    """Draw a box that covers a span."""
    x, y = LEFT + CELL * span.start, TOP + HIGH * span.unit
    pad = 3 if kind == "there" else 6
    picture.box(x + pad, y + pad, CELL * (span.stop - span.start) - 2 * pad, HIGH - 2 * pad, kind, r=3)


def arrow(picture: Picture, span: Span, kind: str) -> None:
    """Draw a transfer as an arrow from its start to the point at which it must be complete."""
    y = TOP + HIGH * (span.unit + 0.5)
    start, stop = LEFT + CELL * span.start, LEFT + CELL * span.stop
    if start == stop:  # the transfer starts where its result is needed, so no computation hides it
        start -= 0.42 * CELL
    picture.arrow((start + 4, y), (stop - 2, y), kind)


def stage_case(strategy: str, config: Config | None = None, **others: Any) -> tuple[Layout, list[str]]:
    """Return the layout of a model (the default one) under a strategy, and the names of its stages."""
    model = model_from_flags(config or Config(), ByteTokenizer())
    of = Case(model, ranks=4, batch_size=8, strategy_name=strategy, **others)
    return of.layout, [stage.scope for stage in model.stages()]


def full_shard() -> str:
    """Draw full-shard: units are gathered before each use and dropped after it."""
    layout, names = stage_case("full-shard")
    about = "A unit is gathered one stage ahead (--prefetch 1), used, and dropped. Backward gathers it again."
    return draw_story("A step under full-shard, on one rank", about, layout, names, gathers=True)


def full_shard_late() -> str:
    """Draw full-shard without prefetch."""
    layout, names = stage_case("full-shard", prefetch=0)
    about = "Without prefetch each gather is awaited: no overlap, but memory for one unit less."
    return draw_story("The same with --prefetch 0", about, layout, names, gathers=True)


def shard_grad_op() -> str:
    """Draw shard-grad-op: full parameters, reduced gradients, one gather after the update."""
    layout, names = stage_case("shard-grad-op")
    about = "Parameters stay gathered. Gradients go to their owners. After the update, new values go to all."
    after = "the new values are gathered"
    return draw_story("A step under shard-grad-op", about, layout, names, after=after, later=True)


def no_shard() -> str:
    """Draw no-shard: buckets of gradients, and a gather of their sums."""
    layout, names = stage_case("no-shard", bucket_mb=2.0)
    about = "Units are buckets (here --bucket-mb 2), filled from the end of the model, as backward runs."
    after = "exact mode: the sums are gathered"
    return draw_story("A step under no-shard", about, layout, names, after=after)


def turns() -> str:
    """Draw full-shard of a mixture whose experts are gathered in three parts, in turns."""
    config = Config(arch="qwen3moe", layers=1, experts=6, experts_used=2)
    layout, names = stage_case("full-shard", config, bucket_mb=2.5)
    about = "The six experts of a block are gathered two at a time (here --bucket-mb 2.5), in turns."
    return draw_story("A step of a mixture under full-shard", about, layout, names, gathers=True)


# ----------------------------------------------------------------------------------------- between nodes


def nodes() -> str:
    """Draw how a sum passes from node to node, and how a gather reaches each node once."""
    ranks, per_node = 6, 2
    partition = Partition(6144, ranks, 1024)
    way = Lanes(ranks, per_node)
    inside, between = way.reduced(partition, ranks, True)
    _, gathered = way.gathered(partition)
    picture = Picture(
        WIDTH,
        "One unit of 6,144 elements on 3 nodes of 2 ranks",
        "Left: a sum passes from node to node. Right: a gather. Numbers are elements sent.",
    )
    picture.text(
        MARGIN,
        62,
        "Ranks with the same index on their nodes form a lane, which carries the shards that they own.",
        "dim",
    )
    side(picture, MARGIN, "a reduction: the running sum moves on", between, forward=True)
    side(picture, WIDTH / 2 + 10, "a gather: each node gets every slice once", gathered, forward=False)
    note = f"Inside a node, the other rank reads {int(inside[0]):,} elements of rank 0's gradient."
    order = "Each node adds its ranks' values in rank order: ((r0 + r1) + r2) + ... as on one node."
    home = "The last node sends a sum to its owner. " + note
    picture.text(MARGIN, 346, order, "dim")
    picture.text(MARGIN, 366, home, "dim")
    return picture.done(388)


def side(picture: Picture, x: float, title: str, sent: Array, forward: bool) -> None:
    """Draw three nodes in a row, and arrows along the lanes between them."""
    picture.text(x, 100, title, "ink bold")
    for node in range(3):
        left = x + 150 * node
        picture.box(left, 118, 112, 196, "faint", edge="edge", r=8)
        picture.text(left + 56, 138, f"node {node}", "dim small mid")
        for lane in range(2):
            rank, y = 2 * node + lane, 150 + 80 * lane
            picture.box(left + 14, y, 84, 40, f"rank{lane}", r=5)
            picture.text(left + 56, y + 18, f"rank {rank}", "on mid")
            picture.text(left + 56, y + 33, f"sends {int(sent[rank]):,}", "on small mid")
    for lane in range(2):
        along(picture, x, 150 + 80 * lane, f"rank{lane}", forward)


def along(picture: Picture, x: float, y: float, kind: str, forward: bool) -> None:
    """Draw a lane: sums from node to node and then to the owner, or slices from each node to all others."""
    for node in range(2):
        left = x + 150 * node + 98
        if forward:
            picture.arrow((left + 3, y + 20), (left + 64, y + 20), kind)
        else:
            picture.arrow((left + 33, y + 20), (left + 64, y + 20), kind)
            picture.arrow((left + 33, y + 20), (left + 3, y + 20), kind)
    for node, low in ((1, 50), (0, 58)) if forward else ((0, 54),):
        here, last = x + 150 * node + 56 + 10 * node, x + 356 + 10 * (1 - node)
        picture.line([(last, y + 42), (last, y + low), (here, y + low), (here, y + 48)], f"{kind} thick")
        picture.arrow((here, y + low), (here, y + 41), kind)
        if not forward:
            picture.arrow((last, y + low), (last, y + 41), kind)


# ------------------------------------------------------------------------------------------ order of sums


def order() -> str:
    """Draw where 1, 2, 3 and 4 ranks compute the micro-batches, and the one sum that results from them."""
    micro_batches = 6
    picture = Picture(
        WIDTH,
        "One step of 6 micro-batches: on different ranks, but with the same sum",
        "Rows for 1, 2, 3 and 4 ranks: in which round and on which rank each micro-batch is computed.",
    )
    picture.text(
        MARGIN,
        62,
        "A box is a micro-batch in the colour of its rank. Boxes of a round are side by side.",
        "dim",
    )
    y = 84
    for ranks in (1, 2, 3, 4):
        picture.text(MARGIN, y + 24, f"{ranks} rank{'s' if ranks > 1 else ''}", "ink bold")
        x = 120.0
        for number in range(len(Rounds(micro_batches, 0, ranks))):
            for rank in range(ranks):
                micro_batch = Rounds(micro_batches, rank, ranks).micro_batch(number)
                if micro_batch is None:
                    picture.box(x, y, 52, 36, "paper", edge="edge", r=4)
                    picture.text(x + 26, y + 23, "idle", "dim small mid")
                else:
                    picture.box(x, y, 52, 36, f"rank{rank}", r=4)
                    picture.text(x + 26, y + 23, f"g{micro_batch}", "on mid")
                x += 56
            x += 20
        y += 50
    picture.line([(MARGIN, y + 2), (WIDTH - MARGIN, y + 2)], "edge")
    chain = "g0"
    for index in range(1, micro_batches):
        chain = f"({chain} + g{index})"
    picture.text(MARGIN, y + 32, "every element", "ink bold")
    picture.text(150, y + 32, chain[1:-1], "ink")
    picture.text(WIDTH - MARGIN, y + 32, "float32, additions in this order", "dim end")
    return picture.done(y + 52)


PICTURES = {
    "full-shard.svg": full_shard,
    "full-shard-prefetch-0.svg": full_shard_late,
    "shard-grad-op.svg": shard_grad_op,
    "no-shard.svg": no_shard,
    "turns.svg": turns,
    "nodes.svg": nodes,
    "order.svg": order,
}
