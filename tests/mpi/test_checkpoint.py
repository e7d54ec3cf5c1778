"""A checkpoint written by any number of ranks, under any strategy, is the same file and loads anywhere."""

import hashlib

import numpy as np
import pytest
import tiny

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, GradAccum, SerialComm, ShardedAdamW
from zero_mpi.checkpoint.reader import GGUFFile
from zero_mpi.checkpoint.state import Description, Progress, load_checkpoint, save_checkpoint
from zero_mpi.errors import UsageError

CONFIG = tiny.MODELS["gpt2 tied"]
DESCRIPTION = Description("gpt2", CONFIG.metadata(), {"seed": 0}, {"threads": 1})
FILES = ("model.gguf", "optimizer.gguf")


def trained(comm, strategy, steps=2):
    """An optimizer after two steps, and where the run stands."""
    module = tiny.make(comm, CONFIG, strategy, bucket_mb=0.02)
    optimizer = ShardedAdamW(module, lr=1e-2)
    go_on(optimizer, range(steps))
    return optimizer, Progress(steps, 100, 0, steps)


def go_on(optimizer, steps):
    accumulator = GradAccum(optimizer.module, 3)
    for step in steps:
        tiny.run_step(optimizer.module, accumulator, CONFIG, step, 3)
        optimizer.step(max_norm=1.0)


def digests(folder):
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES]


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
def test_the_files_of_one_process(exact, strategy, ranks_folder):
    optimizer, progress = trained(exact, strategy)
    folder = save_checkpoint(ranks_folder / "all", optimizer, progress, DESCRIPTION)
    mine = ranks_folder / f"alone{exact.rank}"
    alone = save_checkpoint(mine, *trained(SerialComm(), FULL_SHARD), DESCRIPTION)
    assert digests(folder) == digests(alone)
    assert (ranks_folder / "all" / "latest").resolve() == folder.resolve()


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
def test_going_on_from_a_file_of_one_process(exact, strategy, ranks_folder):
    mine = ranks_folder / f"alone{exact.rank}"
    folder = save_checkpoint(mine, *trained(SerialComm(), FULL_SHARD), DESCRIPTION)
    module = tiny.make(exact, CONFIG, strategy, seed=7)
    optimizer = ShardedAdamW(module, lr=1e-2)
    assert load_checkpoint(folder, optimizer) == Progress(2, 100, 0, 2)
    go_on(optimizer, [2, 3])
    unbroken, _ = trained(SerialComm(), FULL_SHARD, steps=4)
    assert tiny.digest(module.state_dict()) == tiny.digest(unbroken.module.state_dict())


def test_the_file_holds_the_parameters(exact, ranks_folder):
    optimizer, progress = trained(exact, FULL_SHARD)
    folder = save_checkpoint(ranks_folder, optimizer, progress, DESCRIPTION)
    file, state = GGUFFile.open(folder / "model.gguf"), optimizer.module.state_dict()
    assert list(file.tensors) == list(state)
    assert all(np.array_equal(file.tensor(name), array) for name, array in state.items())


def test_only_rank_0_brings_a_unit_together(exact, ranks_folder):
    """Others hold no more than their slices while a checkpoint is written."""
    optimizer, progress = trained(exact, FULL_SHARD)
    before = optimizer.module.parameter_pool.nbytes
    save_checkpoint(ranks_folder, optimizer, progress, DESCRIPTION)
    assert optimizer.module.parameter_pool.nbytes == before
    assert optimizer.module.parameter_pool.lent == 0


def test_a_checkpoint_of_another_shape_is_refused(exact, ranks_folder):
    folder = save_checkpoint(ranks_folder, *trained(exact, FULL_SHARD), DESCRIPTION)
    other = ShardedAdamW(tiny.make(exact, tiny.MODELS["llama"]))
    with pytest.raises(UsageError, match=r"first_moments.* is (missing|of shape)"):
        load_checkpoint(folder, other)
