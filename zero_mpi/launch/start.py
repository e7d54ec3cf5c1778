"""Starts a command: signals first of all, for what is imported next takes a while."""

from __future__ import annotations

from importlib import import_module

from zero_mpi.launch import interrupts
from zero_mpi.launch.stopping import signals


def start(name: str) -> None:
    """Run the command `name`, which hears signals from now on; `train` saves before it ends."""
    interrupts.program = name
    if name == "train":
        signals.listen()
    else:
        interrupts.begin()
    import_module(f"zero_mpi.{name}.command").main()
