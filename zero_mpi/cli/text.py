"""What commands print: text with its width, numbers with their units."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from zero_mpi.files.text import printable

WIDTH, MARGIN = 110, 12  # columns of the text, and of its titles
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def write(lines: Iterable[str], *, keep: str = "") -> None:
    """Print lines, each as one whatever is in it; a reader that has enough, as in `... | head`, is no error.

    `keep`: letters that stay though they do not print, such as ESC where colours are ours.
    """
    data = "".join(f"{printable(line, keep)}\n" for line in lines).encode("utf-8", "backslashreplace")
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def size(count: int) -> str:
    """Bytes for people."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{count / 1024**power:.{int(power > 0)}f} {UNITS[power]}"
