"""How far work under a pulse is: a bar where a person watches, and a line a minute in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from zero_mpi.cli.text import percent
from zero_mpi.errors import JobError, UsageError
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import WIDTH, interval, short, watched
from zero_mpi.tokenize.pulse import Amount, Pulse

BAR = "{percentage:3.0f}%|{bar}| {desc}"
EVERY = 60.0  # seconds between lines where nobody watches


class WorkDisplay:
    """Shows what all ranks have done of `total`, of which another job had done `before`.

    `what` they do, where it is not to make tokens of documents.
    """

    def __init__(self, before: int, total: int, what: str = "") -> None:
        self._before, self._total, self._what = before, max(total, 1), what
        self._begun = self._said = time.monotonic()
        self._bar: Any = None
        if watched() and log.says(log.INFO):
            seen = sys.stderr.isatty()
            self._bar = tqdm(
                total=self._total,
                initial=before,
                bar_format=BAR,
                dynamic_ncols=seen,
                ncols=None if seen else WIDTH,
                leave=False,
            )
            log.write_through(lambda text: tqdm.write(text, file=sys.stderr))

    @property
    def seconds(self) -> float:
        """Since the work began."""
        return time.monotonic() - self._begun

    def show(self, done: Amount) -> None:
        """Show what was done since the work began."""
        if self._bar is not None:
            self._bar.set_description_str(", ".join(self._facts(done)), refresh=False)
            self._bar.n = self._before + done.weight
            self._bar.refresh()  # sums are as rare as a bar may be drawn
        elif time.monotonic() - self._said > EVERY:
            self._said = time.monotonic()
            share = percent((self._before + done.weight) / self._total)
            log.info("%s", "  ".join([share, *self._facts(done)]))

    def close(self) -> None:
        """Close the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            log.write_through(None)

    def _facts(self, done: Amount) -> list[str]:
        left = self._total - self._before - done.weight
        time_left = interval(self.seconds * left / done.weight) if done.weight else "?"
        made = [f"{short(done.documents)} documents", f"{short(done.tokens)} tokens"]
        return [
            *([self._what] if self._what else made),
            f"{done.text_bytes / 1e6 / max(self.seconds, 1e-9):.3g} MB/s",
            f"{time_left} left",
        ]


def work_under_pulse(
    world: World,
    work: Callable[[Pulse], None],
    display: WorkDisplay | None,
    moved: Callable[[], object],
    *,
    stops: Callable[[], bool] = lambda: False,
) -> bool:
    """Let each rank do its `work`; whether all have come to its end. Collective.

    `moved` and `stops` are as `Pulse` takes them. What goes wrong stops all as well, and is raised on all.
    """
    problems = list[Exception]()
    show = None if display is None else display.show
    pulse = Pulse(world.comm, lambda: bool(problems) or stops(), show, moved)
    try:
        work(pulse)
    except (UsageError, JobError) as error:
        problems.append(error)
    pulse.finish()
    if display is not None:
        display.close()
    world.together(lambda: raise_first(problems))
    return pulse.is_done


def raise_first(problems: Sequence[Exception]) -> None:
    """Raise what went wrong on this rank, if something did."""
    if problems:
        raise problems[0]
