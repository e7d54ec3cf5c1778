"""Draws the picture of the packages in ARCHITECTURE.md. Each package is above the packages that it imports.

The positions of the boxes are set here. Each arrow is checked with the functions of structure.py: drawing
fails if an arrow has no import, or if an import between boxes does not lead to a lower row.
"""

from __future__ import annotations

import ast
from pathlib import Path

from structure import imports, layer_of
from svg import MARGIN, Picture

PACKAGE = Path(__file__).resolve().parents[1] / "zero_mpi"
COLUMN, ROW, HEIGHT = 129, 80, 52
TOP = 74
# Package: row, first column, number of columns, and a few words about it.
BOXES = {
    "commands": (0, 0, 7, "evaluate, verify, export, ..."),
    "train": (1, 0, 7, "resolve, setup, trainer, saving"),
    "plan": (2, 0, 4, "memory, traffic, time"),
    "config": (3, 0, 4, "flags"),
    "checkpoint": (4, 0, 4, "GGUF, save, resume"),
    "launch": (4, 4, 2, "start and end of a job"),
    "models": (5, 0, 1, "architectures"),
    "optim": (5, 1, 2, "AdamW, Muon"),
    "data": (5, 6, 1, "tokens"),
    "sharding": (6, 1, 3, "schedule, module"),
    "nn": (7, 0, 2, "layers"),
    "comm": (7, 3, 2, "mpi, shared, nodes, gpu"),
    "ops": (8, 0, 3, "reference, cpu, gpu"),
    "device": (9, 0, 5, "host or GPU, buffers, the ordered sum"),
}
LAST_ROW = 9
# An import, with the column of its arrow.
ARROWS = (
    ("commands", "train", 3), ("train", "plan", 1), ("train", "launch", 5), ("train", "data", 6),
    ("plan", "config", 1), ("config", "checkpoint", 1), ("checkpoint", "models", 0),
    ("checkpoint", "optim", 2), ("checkpoint", "sharding", 3), ("launch", "comm", 4), ("models", "nn", 0),
    ("optim", "sharding", 2),
    ("sharding", "nn", 1), ("sharding", "ops", 2), ("sharding", "comm", 3), ("nn", "ops", 1),
    ("comm", "device", 4), ("ops", "device", 1),
)  # fmt: skip


def used(package: str) -> set[str]:
    """Return the packages that the modules of a package import."""
    return {
        layer_of(name.removeprefix("zero_mpi."))
        for path in (PACKAGE / package).rglob("*.py")
        for _, name in imports(ast.parse(path.read_text(encoding="utf-8")), path, PACKAGE)
        if name.startswith("zero_mpi.")
    }


def packages() -> str:
    """Draw the main packages as boxes. Each box is above the boxes of the packages that it imports."""
    picture = Picture(
        2 * MARGIN + 7 * COLUMN,
        "The main packages; each is above those that it imports",
        "; ".join(f"{above} imports {below}" for above, below, _ in ARROWS),
    )
    for above, below, column in ARROWS:
        assert below in used(above), f"{above} does not import {below}: tools/figures_packages.py"
        x = MARGIN + (column + 0.5) * COLUMN
        start, stop = (TOP + BOXES[name][0] * ROW for name in (above, below))
        picture.arrow((x, start + HEIGHT), (x, stop), "dim")
    for name, (row, column, columns, about) in BOXES.items():
        upwards = [other for other in used(name) & BOXES.keys() - {name} if BOXES[other][0] <= row]
        assert not upwards, f"{name} imports {upwards}: tools/figures_packages.py"
        x, y = MARGIN + column * COLUMN, TOP + row * ROW
        picture.box(x + 5, y, columns * COLUMN - 10, HEIGHT, "faint", edge="edge", r=6)
        picture.text(x + columns * COLUMN / 2, y + 22, name, "ink bold mid")
        picture.text(x + columns * COLUMN / 2, y + 40, about, "dim small mid")
    return picture.done(TOP + LAST_ROW * ROW + HEIGHT + MARGIN)
