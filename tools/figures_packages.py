"""The picture of the packages, for ARCHITECTURE.md: who stands on whom.

Where the boxes stand is written here. An arrow is drawn only if a module of the one package imports the
other, which is asked of the source by the functions of structure.py; one that is not true any more ends the
drawing.
"""

from __future__ import annotations

import ast
from pathlib import Path

from structure import imports, layer_of
from svg import MARGIN, Picture

PACKAGE = Path(__file__).resolve().parents[1] / "zero_mpi"
COLUMN, ROW, HEIGHT = 129, 92, 56
TOP = 86
# Package: row, first column, columns, and what it has.
BOXES = {
    "commands": (0, 0, 7, "evaluate, verify, export, ..."),
    "train": (1, 0, 7, "resolve, setup, trainer, saving"),
    "models": (2, 0, 1, "architectures"),
    "checkpoint": (2, 2, 1, "files of a run"),
    "launch": (2, 5, 1, "start and end"),
    "data": (2, 6, 1, "tokens"),
    "sharding": (3, 1, 4, "schedule, module, optimizer"),
    "nn": (4, 0, 2, "layers"),
    "comm": (4, 3, 2, "mpi, shared, nodes, gpu"),
    "ops": (5, 0, 3, "reference, cpu, gpu"),
    "device": (6, 0, 5, "the host or a GPU, buffers, the sum in order"),
}
# Who imports whom, and the column of the arrow.
ARROWS = (
    ("commands", "train", 3), ("train", "models", 0), ("train", "checkpoint", 2),
    ("train", "sharding", 3), ("train", "launch", 5), ("train", "data", 6),
    ("models", "nn", 0), ("checkpoint", "sharding", 2), ("sharding", "nn", 1),
    ("sharding", "ops", 2), ("sharding", "comm", 3), ("nn", "ops", 1), ("comm", "device", 4),
    ("ops", "device", 2),
)  # fmt: skip


def used(package: str) -> set[str]:
    """The packages that the modules of one import."""
    return {
        layer_of(name.removeprefix("zero_mpi."))
        for path in (PACKAGE / package).rglob("*.py")
        for _, name in imports(ast.parse(path.read_text(encoding="utf-8")), path, PACKAGE)
        if name.startswith("zero_mpi.")
    }


def packages() -> str:
    """The main packages as boxes, each above those that it imports."""
    picture = Picture(
        2 * MARGIN + 7 * COLUMN,
        "The main packages, each above those that it imports",
        "; ".join(f"{above} imports {below}" for above, below, _ in ARROWS),
    )
    for above, below, column in ARROWS:
        assert below in used(above), f"{above} does not import {below}: tools/figures_packages.py"
        x = MARGIN + (column + 0.5) * COLUMN
        start, stop = (TOP + BOXES[name][0] * ROW for name in (above, below))
        picture.arrow((x, start + HEIGHT), (x, stop), "dim")
    for name, (row, column, columns, about) in BOXES.items():
        x, y = MARGIN + column * COLUMN, TOP + row * ROW
        picture.box(x + 5, y, columns * COLUMN - 10, HEIGHT, "faint", edge="edge", r=6)
        picture.text(x + columns * COLUMN / 2, y + 24, name, "ink bold mid")
        picture.text(x + columns * COLUMN / 2, y + 43, about, "dim small mid")
    return picture.done(TOP + 6 * ROW + HEIGHT + MARGIN)
