"""Text of commands: lines, numbers with units, lists of names and ranks."""

import contextlib
import sys
from collections.abc import Iterable, Sequence

from zero_mpi.files.foreign import printable
from zero_mpi.telemetry import log

WIDTH = 110  # columns of the text
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
TIMES = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))  # units per second
FEW = 8  # maximum number of hosts, files or ranks that a message names; it only counts the rest


def write(lines: Iterable[str]) -> None:
    """Print each text as one line, with control characters escaped; ignore a closed pipe (`... | head`)."""
    data = "".join(f"{printable(line)}\n" for line in lines).encode("utf-8", "backslashreplace")
    with contextlib.suppress(log.ClosedPipe), log.writing(sys.stdout):
        sys.stdout.buffer.write(data)


def size(count: float) -> str:
    """Return a number of bytes with its unit: 512 B, 1.0 KiB."""
    power = min(max(int(abs(count)).bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{count / 1024**power:.{min(power, 1)}f} {UNITS[power]}"


def gibibytes(nbytes: int) -> str:
    """Return bytes in GiB, with two decimals, as batch systems show memory."""
    return f"{nbytes / 2**30:.2f} GiB"


def percent(value: float) -> str:
    return f"{100 * value:.3g} %" if abs(value) < 9.99 else f"{100 * value:,.0f} %"


def seconds(value: float) -> str:
    """Return a time with one decimal: 3.0 ms, 2.1 h."""
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    factor, unit = next((pair for pair in TIMES if value * pair[0] >= 1), TIMES[-1])
    return f"{value * factor:.1f} {unit}"


def plural(count: int, name: str) -> str:
    """Return a number with its noun: 1 core, 2 cores."""
    return f"{count:,} {name}{'s' * (count != 1)}"


def few(names: Sequence[str]) -> list[str]:
    """Return the first FEW names, followed by the number of further names."""
    surplus = len(names) - FEW
    return [*names] if surplus <= 0 else [*names[:FEW], f"{surplus} more"]


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: 0-3, 7 for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(few([str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]))


def span(numbers: Iterable[int]) -> str:
    """Return the range of numbers: 1-3 for numbers from 1 to 3, or 2 if all are 2."""
    ordered = sorted(numbers)
    return "-".join(map(str, dict.fromkeys((ordered[0], ordered[-1]))))


def ranks(numbers: Sequence[int]) -> str:
    """Return ranks with their noun: rank 3; ranks 0-3, 7."""
    return f"rank{'s' * (len(numbers) != 1)} {ranges(numbers)}"
