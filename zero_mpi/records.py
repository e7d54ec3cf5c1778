"""What a run tells: `metrics.jsonl`, a progress bar or lines, and notes; from rank 0 only.

Floats are written in full precision, so two exact runs have the same text. The bar is drawn where a person
watches: launchers put a pipe between the ranks and the terminal, so the parents' stderr counts as well.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zero_mpi.errors import naming

METRICS = "metrics.jsonl"
LAUNCHERS = ("mpi", "hydra", "prte", "srun")  # in the names of processes that pass a rank's output on


class Records:
    """Writes the records of a run; on other ranks than 0 every method does nothing."""

    def __init__(self, out: Path, rank: int, *, done: int, steps: int, log_every: int) -> None:
        self._active, self._steps, self._log_every = rank == 0, steps, log_every
        self._bar: Any = None
        if not self._active:
            return
        keep_until(out / METRICS, done)
        self._file = (out / METRICS).open("a", buffering=1)
        if watched():
            self._bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, leave=True)

    def step(self, record: Mapping[str, Any]) -> None:
        """One step's record: a line of metrics.jsonl, and the bar or now and then a line."""
        if not self._active:
            return
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with naming(self._file.name):
            self._file.write(json.dumps(plain) + "\n")
        if self._bar is not None:
            shown = {"loss": f"{record['loss']:.4f}", "tok/s": f"{record['tokens_per_second']:.0f}"}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
        elif record["step"] % self._log_every == 0 or record["step"] == self._steps or "val_loss" in record:
            print(line(record, self._steps), flush=True)

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        if self._active and self._bar is not None:
            self._bar.write(text, file=sys.stderr)  # the bar's own stream: two pipes would mix their order
        elif self._active:
            print(text, flush=True)

    def close(self) -> None:
        """End the bar and the file."""
        if self._active:
            self._file.close()
            if self._bar is not None:
                self._bar.close()
                self._bar = None


def line(record: Mapping[str, Any], steps: int) -> str:
    """A step's record for a log."""
    text = (
        f"step {record['step']:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}  "
        f"grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
        f"{record['tokens_per_second']:.0f} tokens/s"
    )
    return text + (f"  val loss {record['val_loss']:.4f}" if "val_loss" in record else "")


def keep_until(path: Path, step: int) -> None:
    """Drop the records after `step`: a resumed run writes them again."""
    kept = []
    if path.exists():
        for text in path.read_text(errors="replace").splitlines():
            try:
                if json.loads(text)["step"] <= step:
                    kept.append(text + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # a line cut off by a crash
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(kept))
    partial.replace(path)


def watched() -> bool:
    """Whether stderr, or that of a process that started this one, is a terminal."""
    if sys.stderr.isatty():
        return True
    pid = os.getppid()
    while pid > 1:
        try:
            if os.readlink(f"/proc/{pid}/fd/2").startswith(("/dev/pts/", "/dev/tty")):
                name = Path(f"/proc/{pid}/comm").read_text()
                return any(launcher in name for launcher in LAUNCHERS)
            pid = parent(pid)
        except (OSError, ValueError, IndexError):
            return False
    return False


def parent(pid: int) -> int:
    """The parent of process `pid`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
