"""Scripts that run `zero_mpi.train` with extra code before each step."""

from pathlib import Path
from textwrap import dedent, indent

SCRIPT = """
import os, signal, sys, time
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


def train_with(path: Path, body: str, *, setup: str = "", method: str = "step") -> str:
    """Write a script that trains and runs `body` before a method of `Trainer`; return its path.

    `body` has `self`, `rank` and `done`, the number of completed steps. `setup` runs once at the start.
    """
    body = indent(dedent(body).strip(), "    ")
    path.write_text(SCRIPT.format(setup=dedent(setup), method=method, body=body))
    return str(path)
