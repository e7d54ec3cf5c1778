"""Scripts that run `zero_mpi.train` with extra code before each step or another method of the trainer."""

from pathlib import Path
from textwrap import dedent, indent

SCRIPT = """
import os, resource, signal, subprocess, sys, time
from zero_mpi.train import command, trainer

{setup}
usual = trainer.Trainer.{method}

def patched(self, *arguments):
    rank, done = self.world.rank, self.progress.step
{body}
    return usual(self, *arguments)

trainer.Trainer.{method} = patched
command.main()
"""


def patched_training(body: str, *, setup: str = "", method: str = "step") -> str:
    """Return a script that trains and runs `body` before a method of `Trainer`.

    `body` has `self`, `rank` and `done`, the number of completed steps. `setup` runs once at the start.
    """
    body = indent(dedent(body).strip(), "    ")
    return SCRIPT.format(setup=dedent(setup), method=method, body=body)


def train_with(path: Path, body: str, *, setup: str = "", method: str = "step") -> str:
    """Write the script of `patched_training`; return its path."""
    path.write_text(patched_training(body, setup=setup, method=method))
    return str(path)
