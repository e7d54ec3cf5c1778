"""The breakdown of time lines as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zero_mpi.cli.text import plural
from zero_mpi.commands.trace.breakdown import COLUMNS, HIDDEN, OTHER, Share, exposed_by_unit, shares
from zero_mpi.commands.trace.read import LATEST, Recorded
from zero_mpi.files.foreign import shown

UNITS = 5  # of those that are waited for longest
MEANING = (
    "exposed: waits for transfers and other ranks; hidden: transfers under way meanwhile, beside all this;",
    "moving: what is done for transfers between stages, without the waits; sent: bytes given to other ranks",
)


def table(recorded: Recorded) -> Iterator[str]:
    """Lines about one time line."""
    found, steps = shares(recorded), recorded.steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    which += f" of {plural(len(found), 'rank')}"
    yield f"{shown(recorded.path)}: {which}, zero_mpi {shown(recorded.about['zero_mpi'], 40)}"
    yield "milliseconds a step, and their share of it"
    yield from ("", *by_rank(found), "", *MEANING, "")
    yield from (*waited_for(found), *doubts(recorded))


def by_rank(found: Sequence[Share]) -> Iterator[str]:
    """A row for each rank; columns that all ranks have nothing in are left out."""
    columns = [name for name in COLUMNS if name == OTHER or any(share.columns[name] for share in found)]
    names = "".join(f" {name:>15}" for name in columns)
    yield f"{'rank':>4} {'step':>10}{names} {'hidden':>10} {'sent MB':>9}"
    for share in found:
        cells = "".join(
            f" {ms(share.mean(name)):>10} {percent(share.mean(name), share.step)}" for name in columns
        )
        sent = sum(share.sent.values()) / len(share.steps) / 1e6
        yield f"{share.lane.rank:>4} {ms(share.step):>10}{cells} {ms(share.mean(HIDDEN)):>10} {sent:>9.2f}"


def waited_for(found: Sequence[Share]) -> Iterator[str]:
    """What the ranks stand waiting for."""
    longest = exposed_by_unit(found)[:UNITS]
    if longest:
        yield "waited for longest (mean of the ranks, ms a step):"
        yield from (f"  {ms(lasted):>10}  {name}" for name, lasted in longest)


def doubts(recorded: Recorded) -> Iterator[str]:
    """What is not known for certain."""
    wrong = recorded.about.get("clock_error_us")
    if isinstance(wrong, int | float) and 0 < wrong <= LATEST:
        yield f"clocks of different hosts are aligned to {wrong:.0f} us"
    if recorded.about.get("ends_in") is not None:
        yield f"recording ended in step {shown(recorded.about['ends_in'], 40)}: there were too many events"


def ms(microseconds: float) -> str:
    """Milliseconds, for people."""
    return f"{microseconds / 1e3:.3f}"


def percent(part: float, whole: float) -> str:
    """A share in four places."""
    return f"{100 * part / whole:3.0f}%" if whole else "  - "
