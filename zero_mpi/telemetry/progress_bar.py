"""Progress display of a run: a bar on a terminal, otherwise a log line every few steps.

Both show, in 80 columns: step, loss, speed, share of peak FLOP/s, largest memory of a rank, time left.
A launcher puts a pipe between the ranks and the terminal, so the stderr of parent processes is checked too.
"""

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zero_mpi.telemetry import log

LAUNCHERS = ("mpi", "hydra", "prte", "srun")  # parts of the names of launchers, which forward output
WIDTH = 79  # columns of a bar if the width of the terminal is unknown
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"


class Display:
    """Display of the steps of a run that begins after `done` of `steps` steps."""

    def __init__(self, done: int, steps: int) -> None:
        self._steps_before, self._steps, self._memory = done, steps, 0
        self._begin_time = self._line_time = time.perf_counter()
        self._bar: Any = None
        if watched() and log.says(log.INFO):
            is_terminal = sys.stderr.isatty()
            shape = {"dynamic_ncols": is_terminal, "ncols": None if is_terminal else WIDTH}
            self._bar = tqdm(total=steps, initial=done, bar_format=BAR, **shape)
            # Lines always use the stream of the bar, because two pipes do not keep the order of lines.
            log.write_through(lambda text: tqdm.write(text, file=sys.stderr))

    def step(self, record: Mapping[str, Any], logged: bool) -> None:
        """Show that a step is done. Without a bar, print a line if `logged`, or 60 s after the last line."""
        self._memory = max(record.get("memory_bytes", [self._memory]))
        number = record["step"]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._facts(record)), refresh=False)
            self._bar.update()
        elif logged or time.perf_counter() - self._line_time > 60:
            self._line_time = time.perf_counter()
            log.info("%s", "  ".join([f"step {self._of(number)}", *self._facts(record)]))
        if "val_loss" in record:
            texts = (f"{name} {loss:.4f}" for name, loss in record.get("val_losses", {}).items())
            log.info("%s", "  ".join([f"step {self._of(number)}  val loss {record['val_loss']:.4f}", *texts]))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _of(self, number: int) -> str:
        return f"{number:>{len(str(self._steps))}}/{self._steps}"

    def _facts(self, record: Mapping[str, Any]) -> list[str]:
        facts = [f"loss {record['loss']:.4f}", f"{short(record['tokens_per_second'])} tok/s"]
        if "mfu" in record:
            facts.append(f"{record['mfu']:.0%} of peak")
        if self._memory:
            memory = self._memory / 2**20
            facts.append(f"{memory:.0f} MiB" if memory < 1024 else f"{memory / 1024:.1f} GiB")
        elapsed, number = time.perf_counter() - self._begin_time, record["step"]
        rest = elapsed * (self._steps - number) / (number - self._steps_before)  # by a step's mean time
        return [*facts, f"{interval(rest)} left" if number < self._steps else f"total {interval(elapsed)}"]


def short(count: float) -> str:
    """Return a number as text for messages, with up to three digits."""
    for unit in ("", "k", "M"):
        if not count >= 999.5:
            return f"{count:.0f}" if not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}G"


def interval(seconds: float) -> str:
    """Return a time as text for messages."""
    if not math.isfinite(seconds):
        return "?"
    if seconds >= 100 * 3600:
        return f"{seconds / 86400:.0f} d"
    return str(tqdm.format_interval(round(seconds)))


def watched() -> bool:
    """Return True if stderr of this process or of its launcher is a terminal."""
    if sys.stderr.isatty():
        return True
    pid = os.getppid()
    while pid > 1:
        try:
            if os.readlink(f"/proc/{pid}/fd/2").startswith(("/dev/pts/", "/dev/tty")):
                name = Path(f"/proc/{pid}/comm").read_text()
                return any(launcher in name for launcher in LAUNCHERS)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])  # parent's pid
        except (OSError, ValueError, IndexError):
            return False
    return False
