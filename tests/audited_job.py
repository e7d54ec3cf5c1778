"""A job of three ranks whose command is the real one, with a bit that flips in what rank 1 computes."""

from pathlib import Path

FLAGS = ["--batch-size", "5", "--micro-batch", "1", "--context", "16", "--sample", "0", "--steps", "6"]
FLAGS += ["--save-every", "2", "--eval-every", "0"]
UNITS = 4  # an embedding, two blocks, a head: each is seen when watched, and when computed again
# A bit of the gradients of rank 1 flips at the second step that is audited. Ranks count what they compute.
FLIPPED = """
import numpy as np
from pathlib import Path
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.sharding.passes import Pass
from zero_mpi.sharding.witness import Witness
from zero_mpi.train import command

see, calls = Witness.see, 0
compute, computed = Pass.loss_and_backward, 0

def spoiled(self, unit):
    global calls
    calls += MPI.COMM_WORLD.rank == 1
    if calls == {call}:
        unit.gradient.of_round.view(np.uint32)[3] ^= np.uint32(1 << 20)
    see(self, unit)

def counted(self, stage):
    global computed
    computed += not self.is_idle
    compute(self, stage)
    Path({folder!r}, f"computed-{{MPI.COMM_WORLD.rank}}").write_text(str(computed))

Witness.see, Pass.loss_and_backward = spoiled, counted
command.main()
"""


def write_script(folder: Path, fault: bool) -> Path:
    """The script, in a folder where its ranks write what they computed; without the fault it only counts."""
    script = folder / "flipped.py"
    script.write_text(FLIPPED.format(call=2 * UNITS + 2 if fault else -1, folder=str(folder)))
    return script
