"""Tests of the ranks that write for their node: their number by file system, equal files, few calls.

Groups of ranks count as nodes (`ZERO_MPI_RANKS_PER_NODE`), and the folder appears to be on another file
system. Writes are counted in Python, and the kernel's own count agrees
(`benchmarks/checkpoint_calls.py` prints both).
"""

import importlib.util
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import FILES, digests, save_checkpoint
from test_checkpoint import DESCRIPTION, trained
from test_nodes import nodes_of

from zero_mpi import FULL_SHARD, NO_SHARD
from zero_mpi.checkpoint.parallel_write import OutputFile
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.comm.guarded import CheckedComm
from zero_mpi.files import file_systems

SPEC = importlib.util.spec_from_file_location(
    "file_calls", Path(__file__).resolve().parents[2] / "benchmarks" / "file_calls.py"
)
file_calls = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(file_calls)


def pretend(monkeypatch, folder, kind):
    """Make `folder` look like a mount of file system `kind`, by a mountinfo file in it for each rank."""
    mounts = folder / f"mountinfo-{os.getpid()}"
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {folder} rw shared:1 - {kind} server rw\n"
    )
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)


@contextmanager
def saver(folder, optimizer, ranks_per_node, **options):
    with nodes_of(ranks_per_node):
        writer = Saver(folder, optimizer, DESCRIPTION, parallel=True, **options)
    yield writer
    writer.close()


def first_ranks(size, ranks_per_node):
    return list(range(0, size, ranks_per_node))


CASES = {  # file system, ranks per node, writers per node, and the ranks that write
    "lustre": ("lustre", 2, None, lambda size: first_ranks(size, 2)),
    "gpfs": ("gpfs", 3, None, lambda size: first_ranks(size, 3)),
    "two of a node": ("beegfs", 4, 2, lambda size: first_ranks(size, 2 if size > 2 else 1)),
    "each": ("lustre", 2, 2, lambda size: list(range(size))),
    "nfs": ("nfs4", 1, None, lambda size: [0]),
    "a host's own": ("ext4", 8, None, lambda size: list(range(size))),
}


@pytest.mark.world(1, 2, 4, 8)
@pytest.mark.parametrize("case", CASES)
def test_who_writes_and_that_the_files_are_the_same(case, mpi, ranks_folder, monkeypatch):
    kind, ranks_per_node, writers, expected = CASES[case]
    optimizer, progress = trained(mpi, FULL_SHARD)
    gathered = save_checkpoint(ranks_folder / "gathered", optimizer, progress, DESCRIPTION)
    pretend(monkeypatch, ranks_folder, kind)
    with saver(ranks_folder / "out", optimizer, ranks_per_node, writers_per_node=writers) as writer:
        with file_calls.FileCalls() as calls:
            writer.save(progress)
        assert digests(ranks_folder / "out" / "latest") == digests(gathered)
    writes = mpi.allgather_object(sum(calls.of("pwritev", name) for name in FILES))
    assert [rank for rank, count in enumerate(writes) if count] == expected(mpi.size)


@pytest.mark.world(4, 8)
def test_a_node_opens_writes_and_syncs_a_file_by_one_rank(mpi, ranks_folder, monkeypatch):
    """A node's other ranks write nothing. A unit takes two writes for any number of tensors."""
    pretend(monkeypatch, ranks_folder, "lustre")
    optimizer, progress = trained(mpi, FULL_SHARD)
    with saver(ranks_folder / "out", optimizer, 2) as writer, file_calls.FileCalls() as calls:
        writer.save(progress)
    first = mpi.rank % 2 == 0
    if not first:
        assert not calls.written
        assert not [call for call, _ in calls.counts if call not in ("stat", "lstat")]
    units, tensors = len(optimizer.module.units), len(optimizer.module.params)
    for name, parts in zip(FILES, (1, 2), strict=True):
        assert (calls.of("open", name), calls.of("fsync", name)) == (first, first)
        limit = 2 * parts * units + 1  # the header needs one more write
        assert calls.of("pwritev", name) <= first * limit < parts * tensors
    named = [calls.of(call) for call in ("mkdir", "ftruncate", "rename", "replace", "symlink")]
    assert named == ([1, 2, 1, 1, 1] if mpi.rank == 0 else [0] * 5) or named[0] == 2  # OUT itself, at first


@pytest.mark.world(4)
def test_a_host_brings_to_disk_what_all_of_it_have_written(mpi, ranks_folder, monkeypatch):
    """No rank writes after the sync of its host."""
    pretend(monkeypatch, ranks_folder, "lustre")
    optimizer, progress = trained(mpi, FULL_SHARD)
    shared = ranks_folder / "order"

    def noted(word, action):
        def call(self, *arguments):
            time.sleep(0.02 * (mpi.rank % 2))  # delays the ranks that write without a sync
            action(self, *arguments)
            with shared.open("a") as file:
                file.write(f"{word} {self.path.name} {mpi.rank // 2}\n")

        return call

    monkeypatch.setattr(OutputFile, "write_at", noted("write", OutputFile.write_at))
    monkeypatch.setattr(OutputFile, "sync", noted("sync", OutputFile.sync))
    with saver(ranks_folder / "out", optimizer, 2, writers_per_node=2) as writer:
        writer.save(progress)
    mpi.barrier()
    lines = shared.read_text().splitlines()
    for name in FILES:
        for node in (0, 1):
            words = [line.split()[0] for line in lines if line.endswith(f"{name} {node}")]
            assert words.count("sync") == 1
            assert words[-1] == "sync"


@pytest.mark.world(3, 4)
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_a_save_behind_training_by_one_writer_a_node(strategy, mpi, ranks_folder, monkeypatch):
    """The transport checks that all ranks start the same collectives."""
    optimizer, progress = trained(CheckedComm(mpi), strategy)
    gathered = save_checkpoint(ranks_folder / "gathered", optimizer, progress, DESCRIPTION)
    pretend(monkeypatch, ranks_folder, "gpfs")
    with saver(ranks_folder / "out", optimizer, 2, background=True) as writer:
        writer.save(progress)
        writer.wait()
    assert digests(ranks_folder / "out" / "latest") == digests(gathered)
