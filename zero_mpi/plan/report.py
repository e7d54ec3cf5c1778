"""Plans and sweeps as text: a column for each strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Machine
from zero_mpi.plan.max_size import MOST, elements
from zero_mpi.plan.plan import Plan
from zero_mpi.plan.scaling import Point

TITLE, COLUMN = 34, 16  # widths
MEMORY = {
    "parameters": "parameters",
    "masters": "parameters in fp32",
    "gradients": "gradients",
    "moments": "moments",
    "rooms": "rooms for moments",
    "gathered": "gathered units",
    "gradient_buffers": "gradient buffers",
    "activations": "activations",
    "logits": "logits",
    "transport": "arriving slices",
    "tables": "tables",
    "workspace": "workspace of products",
    "snapshot": "copies for --async-save",
    "total": "total",
}


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds(value: float) -> str:
    """A time for people."""
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.1f} {unit}"
    raise AssertionError("microseconds are the last unit")


def row(title: str, values: Sequence[str]) -> str:
    """A line of the table."""
    return f"  {title:{TITLE}}" + "".join(f"{value:>{COLUMN}}" for value in values)


def head(title: str, plans: Sequence[Plan]) -> str:
    """The first line of a table."""
    return f"{title:{TITLE + 2}}" + "".join(f"{plan.case.strategy_name:>{COLUMN}}" for plan in plans)


def report(plans: Sequence[Plan], machine: Machine, known: Sequence[str]) -> Iterator[str]:
    """All of it."""
    yield from introduction(plans[0].case, machine, known)
    yield ""
    yield from memory_lines(plans)
    yield ""
    yield from traffic_lines(plans)
    yield ""
    yield from time_lines(plans)
    if machine.memory is not None:
        yield ""
        yield from fit_lines(plans, machine.memory)


def introduction(case: Case, machine: Machine, known: Sequence[str]) -> Iterator[str]:
    """What is planned, and by which rates."""
    yield (
        f"{case.model.arch}, {elements(case.model):,} parameters; {case.ranks} rank(s) on {case.nodes} "
        f"node(s); {case.tokens:,} tokens a step in {case.rounds.micro_batches} micro-batch(es) of "
        f"{case.micro_batch} x {case.context}, {len(case.rounds)} round(s){kinds_of(case)}"
    )
    rates = {
        "flops": f"{machine.flops / 1e9:.3g} GFLOP/s a rank",
        "memory_bandwidth": f"{machine.moves / 1e9:.3g} GB/s a rank",
        "host_bandwidth": f"{machine.host_link / 1e9:.3g} GB/s to the host",
        "alpha_node": f"{seconds(machine.node.alpha)} in a node",
        "beta_node": f"{rate(machine.node.beta)} in a node",
        "alpha": f"{seconds(machine.between.alpha)} between nodes",
        "beta": f"{rate(machine.between.beta)} between nodes",
    }
    for title, wanted in (("given", True), ("assumed", False)):
        texts = [text for name, text in rates.items() if (name in known) == wanted and applies(name, case)]
        if texts:
            yield f"rates {title}: {', '.join(texts)}"


def kinds_of(case: Case) -> str:
    """Device and types, where they are not the CPU and float32."""
    about = [f"{case.device}, a GPU a rank"] * case.on_gpu
    if case.precision.is_low:
        about.append(f"{case.precision_name}, gradients {case.reduce_dtype or case.precision_name}")
    if case.offloads:
        about.append(
            "moments and fp32 parameters on the host" if case.offloads_masters else "moments on the host"
        )
    return "".join(f"; {text}" for text in about)


def applies(name: str, case: Case) -> bool:
    """Whether a rate makes a difference."""
    return name != "host_bandwidth" or case.offloads


def rate(beta: float) -> str:
    """A bandwidth from seconds a byte."""
    return f"{1e-9 / beta:.3g} GB/s" if beta else "no time a byte"


def memory_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Bytes of the largest rank."""
    yield head("memory of the largest rank", plans)
    tables = [plan.as_json()["memory"] for plan in plans]
    for name, title in MEMORY.items():
        if any(table[name] for table in tables):
            yield row(title, [size(table[name]) for table in tables])
    if any(plan.memory.node_shared for plan in plans):
        yield row("(a node in /dev/shm)", [size(plan.memory.node_shared) for plan in plans])
    if any(plan.memory.host for plan in plans):
        yield row("(in the host's memory)", [size(plan.memory.host) for plan in plans])


def traffic_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Bytes of a step."""
    yield head("bytes that ranks give in a step", plans)
    yield row("transport", [plan.case.transport.name for plan in plans])
    traffic = [plan.traffic for plan in plans]
    yield row("a rank, in its node", [size(given.inside.max()) for given in traffic])
    yield row("a rank, to other nodes", [size(given.between.max()) for given in traffic])
    yield row("rank 0 (sent_bytes)", [f"{given.sent[0]:,}" for given in traffic])
    yield row("all ranks, in nodes", [size(given.inside.sum()) for given in traffic])
    yield row("all ranks, between nodes", [size(given.between.sum()) for given in traffic])


def time_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Seconds of a step."""
    yield head("time of a step", plans)
    times = [plan.time for plan in plans]
    yield row("computation", [seconds(time.computation) for time in times])
    yield row("communication", [seconds(time.communication) for time in times])
    yield row("of it waited for", [seconds(time.exposed) for time in times])
    yield row("step", [seconds(time.seconds) for time in times])
    yield row("tokens a second, all ranks", [f"{plan.tokens_per_second:,.0f}" for plan in plans])


def fit_lines(plans: Sequence[Plan], limit: int) -> Iterator[str]:
    """The largest sizes."""
    yield head(f"largest that fits into {size(limit)}", plans)
    found = [plan.fits for plan in plans if plan.fits is not None]
    yield row("micro-batch", [counted(fits.micro_batch) for fits in found])
    yield row("layers", [counted(fits.layers) for fits in found])
    yield row("  parameters then", [f"{fits.layers_parameters:,}" for fits in found])
    yield row("width", [f"{fits.width:,}" if fits.width else "none" for fits in found])
    yield row("  parameters then", [f"{fits.width_parameters:,}" for fits in found])


def counted(count: int) -> str:
    """A largest number, or that none fits, or that the search went no further."""
    return "none" if count == 0 else f"{count:,}{' or more' if count >= MOST else ''}"


def sweep_lines(case: Case, points: Sequence[Point], limits: Sequence[str]) -> Iterator[str]:
    """A strategy's points, and what stops it."""
    yield f"{case.strategy_name}: {case.rounds.micro_batches} micro-batches a step at any number of ranks"
    yield row("ranks (nodes)", ["memory a rank", "step", "waits", "tokens/s", "efficiency"])
    for point in points:
        yield row(
            f"{point.ranks} ({point.nodes})",
            [
                size(point.memory),
                seconds(point.seconds),
                seconds(point.exposed),
                f"{point.tokens_per_second:,.0f}",
                f"{point.efficiency:.0%}",
            ],
        )
    yield (
        f"  {case.strategy_name} scales up to the end of this table"
        if not limits
        else (f"  {case.strategy_name} stops scaling: {'; '.join(limits)}")
    )
