"""Long contexts and large vocabularies take bounded memory."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zero_mpi import GradAccum, SerialComm, ShardedAdamW, ShardedModule
from zero_mpi.device.arrays import recycled_stats  # noqa: F401 (used by the programs below)
from zero_mpi.models import GPT2, Llama  # noqa: F401 (used by the programs below)
from zero_mpi.nn import CrossEntropy
from zero_mpi.ops import backend

needs_numba = pytest.mark.skipif(backend() == "numpy", reason="the reference operations make new arrays")

SIZES = {"layers": 2, "dim": 64, "heads": 4, "ffn": 160, "context": 96, "vocab_size": 512}


def make_step(config, rows):
    module = ShardedModule(config.stages(), SerialComm())
    module.initialize(seed=0)
    optimizer, accumulator = ShardedAdamW(module), GradAccum(module, 1)
    drawn = np.random.default_rng(0).integers(config.vocab_size, size=(rows, config.context_length + 1))
    criterion = CrossEntropy(drawn[:, 1:], 1.0 / drawn[:, 1:].size)

    def step():
        accumulator.accumulate(drawn[:, :-1], criterion)
        accumulator.total_loss()
        optimizer.step(max_norm=1.0)

    return step


def held_after_steps(name, sizes, rows):
    code = (
        "import test_steady_state as t\n"
        f"step = t.make_step(t.{name}.from_flags({sizes!r}), rows={rows})\n"
        "step(), step()\n"
        "print(t.recycled_stats().held)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), timeout=120)
    return int(done.stdout)


def environment():
    here = Path(__file__).resolve().parent
    return os.environ | {"PYTHONPATH": f"{here}:{here.parent}:{here.parents[1]}"}


@needs_numba
def test_a_context_of_4096_takes_memory_of_its_length_and_not_of_its_square():
    """Per token: 16 numbers a column of the model, 6 a column of the feed-forward, logits and their slope."""
    sizes = SIZES | {"layers": 1, "heads": 8, "kv_heads": 8, "context": 4096, "tied": False}
    tokens, square = 4096, 4 * 8 * 4096**2
    bound = 4 * tokens * (16 * sizes["dim"] + 6 * sizes["ffn"] + 2 * sizes["vocab_size"])
    held = held_after_steps("Llama", sizes, 1)
    assert held < 1.25 * bound < square / 4
