"""A checkpoint has the same bytes for any number of ranks and any strategy, and loads anywhere."""

import errno
import io
import threading
import tracemalloc

import pytest
import tiny
from checkpoints import digests, save_checkpoint
from recording import RecordingComm

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, GradAccum, SerialComm, ShardedAdamW
from zero_mpi.checkpoint import parallel_write
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.checkpoint.state import Description, TrainingProgress
from zero_mpi.errors import JobError
from zero_mpi.models import GPT2

CONFIG = tiny.MODELS["gpt2 tied"]
DESCRIPTION = Description("gpt2", CONFIG.metadata(), {"seed": 0}, {"threads": 1})


def trained(comm, strategy, steps=2):
    module = tiny.make(comm, CONFIG, strategy, bucket_mb=0.02)
    optimizer = ShardedAdamW(module, lr=1e-2)
    go_on(optimizer, range(steps))
    return optimizer, TrainingProgress(steps, 100, 0, steps)


def go_on(optimizer, steps):
    accumulator = GradAccum(optimizer.module, 3)
    for step in steps:
        tiny.run_step(optimizer.module, accumulator, CONFIG, step, 3)
        optimizer.step(max_norm=1.0)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
def test_the_files_of_one_process(exact, strategy, ranks_folder):
    optimizer, progress = trained(exact, strategy)
    folder = save_checkpoint(ranks_folder / "all", optimizer, progress, DESCRIPTION)
    Saver(ranks_folder / "own ranges", optimizer, DESCRIPTION, parallel=True).save(progress)
    path = ranks_folder / f"alone{exact.rank}"
    single = save_checkpoint(path, *trained(SerialComm(), FULL_SHARD), DESCRIPTION)
    assert digests(folder) == digests(ranks_folder / "own ranges" / "latest") == digests(single)
    assert (ranks_folder / "all" / "latest").resolve() == folder.resolve()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(exact, strategy, parallel, ranks_folder):
    """Training continues during two saves, and the second save reuses the buffers of the first."""
    optimizer, _ = trained(exact, strategy)
    saver = Saver(ranks_folder / "behind", optimizer, DESCRIPTION, background=True, parallel=parallel)
    expected = []
    for step in (2, 3):
        now = save_checkpoint(ranks_folder / f"now{step}", optimizer, TrainingProgress(step), DESCRIPTION)
        saver.save(TrainingProgress(step))
        go_on(optimizer, [step])
        expected.append(digests(now))
    saver.wait()
    actual = [digests(ranks_folder / "behind" / f"step-{step:08d}") for step in (2, 3)]
    assert actual == expected
    assert [saved.step for saved in saver.new_checkpoints()] == [2, 3]
    assert not [thread for thread in threading.enumerate() if "saver" in thread.name]


@pytest.mark.world(2, 3)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_failure_in_the_middle_closes_everything(exact, parallel, ranks_folder, monkeypatch):
    optimizer, progress = trained(exact, FULL_SHARD)
    first = save_checkpoint(ranks_folder, optimizer, TrainingProgress(1), DESCRIPTION)
    before = digests(first)
    if exact.rank == (exact.size - 1 if parallel else 0):
        monkeypatch.setattr(parallel_write.Output, "put", refuse_moments)
    with pytest.raises(JobError, match=r"cannot write .*optimizer.gguf: .*quota.*latest is step-00000001"):
        Saver(ranks_folder, optimizer, DESCRIPTION, parallel=parallel).save(progress)
    exact.barrier()
    assert digests(ranks_folder / "latest") == before
    assert sorted(path.name for path in ranks_folder.iterdir()) == ["latest", "step-00000001"]


def refuse_moments(self, offset, *data):
    if self.content.path.name == "optimizer.gguf":
        self.problem = OSError(errno.EDQUOT, "Disk quota exceeded", str(self.content.path))


@pytest.mark.parametrize("parallel", [False, True])
def test_rank_0_needs_room_for_one_unit(exact, parallel, ranks_folder):
    flags = {"layers": 3, "dim": 160, "heads": 4, "ffn": 640, "context": 8, "vocab_size": 61, "tied": True}
    module = tiny.make(exact, GPT2.from_flags(flags))
    optimizer = ShardedAdamW(module)
    unit = 4 * max(unit.unit.length for unit in module.units)
    save_checkpoint(ranks_folder, optimizer, TrainingProgress(1), DESCRIPTION)  # warm-up: loads modules
    tracemalloc.start()
    Saver(ranks_folder, optimizer, DESCRIPTION, parallel=parallel).save(TrainingProgress(2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gathers = exact.rank == 0 and exact.size > 1 and not parallel
    small = 200_000 + io.DEFAULT_BUFFER_SIZE  # the buffer of an open file has 128 KiB since Python 3.14
    assert unit > 3 * small
    assert peak < (unit + small if gathers else small), (peak, unit)


def test_only_rank_0_is_sent_anything_and_brings_units_together(exact, ranks_folder):
    comm = RecordingComm(exact)
    optimizer, progress = trained(comm, FULL_SHARD)
    comm.log.clear()
    pool = optimizer.module.parameter_pool
    before = pool.nbytes
    save_checkpoint(ranks_folder, optimizer, progress, DESCRIPTION)
    assert {event.kind for event in comm.log} <= {"gather"}
    assert (pool.nbytes, pool._lent) == (before, {})
    slices = [unit.parameters.master_shard.nbytes for unit in optimizer.module.units]
    assert sum(event.sent for event in comm.log) == (0 if exact.rank == 0 else 3 * sum(slices))
