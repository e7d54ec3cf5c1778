"""Text of plans, with a column for each strategy, and of sweeps, with a line for each number of ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from zero_mpi.cli.text import gibibytes, seconds, size
from zero_mpi.files.foreign import shown
from zero_mpi.models.model_config import elements
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import RATES, Machine, bandwidth
from zero_mpi.plan.plan import MOST, Plan, Point
from zero_mpi.plan.rank_memory import ELSEWHERE, TITLES, Resident, keeps_slices, titles
from zero_mpi.sharding.parameters import STATE

TITLE, COLUMN = 34, 16  # widths of columns
Rows = Iterable[tuple[str, Callable[[Plan], str]]]  # title of a row, function for the text of a plan
TRAFFIC: Rows = (
    ("transport", lambda plan: plan.case.transport.name),
    ("per rank, inside its node", lambda plan: size(plan.traffic.inside.max())),
    ("per rank, to other nodes", lambda plan: size(plan.traffic.between.max())),
    ("rank 0 (sent_bytes)", lambda plan: f"{plan.traffic.sent[0]:,}"),
)
TIME: Rows = (
    ("computation", lambda plan: seconds(plan.time.computation)),
    ("communication", lambda plan: seconds(plan.time.communication)),
    ("exposed", lambda plan: seconds(plan.time.exposed)),
    ("step", lambda plan: seconds(plan.time.seconds)),
    ("tokens per second, all ranks", lambda plan: f"{plan.tokens_per_second:,.0f}"),
)


def row(title: str, values: Iterable[str]) -> str:
    return f"  {title:{TITLE}}" + "".join(f"{value:>{COLUMN}}" for value in values)


def rows(plans: Sequence[Plan], titles: Rows) -> Iterator[str]:
    return (row(title, map(text, plans)) for title, text in titles)


def head(title: str, plans: Sequence[Plan]) -> str:
    return f"{title:{TITLE + 2}}" + "".join(f"{plan.case.strategy_name:>{COLUMN}}" for plan in plans)


def report(plans: Sequence[Plan], machine: Machine, rates: Sequence[str]) -> Iterator[str]:
    """Yield all lines of a report."""
    yield from introduction(plans[0].case, machine, rates)
    yield from ("", *memory_lines(plans), "", *traffic_lines(plans))
    yield from ("", head("time per step", plans), *rows(plans, TIME))
    if machine.memory is not None:
        counts = [micro_batch_text(plan.largest) for plan in plans if plan.largest is not None]
        title = f"largest that fits into {size(machine.memory)}"
        yield from ("", head(title, plans), row("micro-batch", counts))


def introduction(case: Case, machine: Machine, rates: Sequence[str]) -> Iterator[str]:
    """Yield lines with the planned case and the known and assumed speeds."""
    yield (
        f"{case.model.arch}, {elements(case.model):,} parameters; {case.ranks} rank(s) on {case.nodes} "
        f"node(s); {case.tokens:,} tokens per step in {case.rounds.micro_batches} micro-batch(es) of "
        f"{case.micro_batch} x {case.context}, {len(case.rounds)} round(s){kinds_of(case)}"
    )
    if case.model.stored:
        yield f"frozen base: {base(case)}"
    speeds, texts = machine.joining(case.nodes), {"given": list[str](), "assumed": list[str]()}
    for name, (place, figure, unit) in RATES.items():
        if name != "host_bandwidth" or case.offloaded_arrays:
            source = "given" if name in rates else "assumed"
            texts[source].append(f"{figure(attrgetter(place)(speeds))} {unit}")
    yield from (f"rates {source}: {', '.join(entries)}" for source, entries in texts.items() if entries)
    if machine.levels:
        levels = (
            f"{shown(level.name)}, {'all nodes' if level.nodes is None else f'up to {level.nodes} node(s)'}: "
            f"{seconds(level.link.alpha)}, {bandwidth(level.link.beta)}"
            for level in machine.levels
        )
        yield f"network: {'; '.join(levels)}"


def base(case: Case) -> str:
    """Return the size of the frozen base model in GGUF blocks and the ranks that share it, as text."""
    by = "over" if keeps_slices(case) else "on each of"
    return f"{size(case.model.stored_bytes)} in the file's blocks {by} {case.owners} rank(s)"


def kinds_of(case: Case) -> str:
    """Return the device, dtypes and offload as text; the defaults (CPU, float32, none) are left out."""
    notes = [f"; {case.device}, one GPU per rank"] * case.on_gpu
    if case.precision.is_low:
        notes.append(f"; {case.precision_name}, gradients {case.reduce_dtype or case.precision_name}")
    if case.offloaded_arrays:
        notes.append(f"; moments{' and fp32 parameters' if case.offload == STATE else ''} on the host")
    return "".join(notes)


def memory_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield lines with the bytes of the largest rank."""
    yield head("memory of the largest rank", plans)
    for name in (*(name for name in TITLES if name not in ELSEWHERE), "total", *ELSEWHERE):
        sizes = [getattr(plan.memory, name) for plan in plans]
        if any(sizes):
            yield row(TITLES.get(name, name), map(size, sizes))


def traffic_lines(plans: Sequence[Plan]) -> Iterator[str]:
    yield from (head("bytes sent per step", plans), *rows(plans, TRAFFIC))


def ask_lines(nodes: Sequence[Resident]) -> Iterator[str]:
    """Yield the memory to request from a batch system, and its parts."""
    for name, title in titles(Resident).items():
        sizes = [getattr(node, name) for node in nodes]
        if any(sizes) or name != "sample":  # the sample is listed only if it is requested
            yield row(title, map(size, sizes))
    yield row("to request, per node", [gibibytes(node.ask) for node in nodes])


def micro_batch_text(count: int) -> str:
    """Return the largest micro-batch as text: "none" for 0, with "or more" at the search limit."""
    return "none" if count == 0 else f"{count:,}{' or more' if count >= MOST else ''}"


def sweep_lines(case: Case, points: Sequence[Point]) -> Iterator[str]:
    """Yield the lines of a sweep over numbers of ranks for one strategy."""
    yield f"{case.strategy_name}: {case.rounds.micro_batches} micro-batches per step at any number of ranks"
    yield row("ranks (nodes)", ["memory per rank", "step", "waits", "tokens/s", "efficiency"])
    for point in points:
        figures = [size(point.memory), seconds(point.seconds), seconds(point.exposed)]
        figures += [f"{point.tokens_per_second:,.0f}", f"{point.efficiency:.0%}"]
        yield row(f"{point.ranks} ({point.nodes})", figures)
