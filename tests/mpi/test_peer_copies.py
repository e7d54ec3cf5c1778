"""Copies in memory made by any number of ranks under any strategy are found and taken up by any others.

A folder stands for the shared memory of all hosts; each rank's files have the number of its node.
"""

import errno
import hashlib
import os
import tracemalloc

import pytest
import tiny
from test_checkpoint import CONFIG, DESCRIPTION, FILES, digests, go_on, trained
from test_nodes import nodes_of

from zero_mpi import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, SerialComm, ShardedAdamW
from zero_mpi.checkpoint import peer_copies
from zero_mpi.checkpoint.copy_file import CopyFile, CopyPlace, record_of
from zero_mpi.checkpoint.copy_search import find_copies, load_copies
from zero_mpi.checkpoint.peer_copies import PeerCopies
from zero_mpi.checkpoint.saver import save_checkpoint
from zero_mpi.checkpoint.state import TrainingProgress
from zero_mpi.comm.neighbours import Neighbours, ring
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.errors import JobError
from zero_mpi.plan.case import Case
from zero_mpi.plan.copy_time import node_bytes as planned

STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]
RUN = "ab12"
GAPS = (
    12 * 4 * 1024
)  # bytes of a parameter that a plan counts and no copy has: it ends at a multiple of a quantum


def copies_of(optimizer, folder, job="01", ranks_per_node=1):
    """What makes copies of an optimizer, where so many ranks are a node."""
    comm = optimizer.module.comm
    with nodes_of(ranks_per_node):
        nodes = comm.nodes()
    neighbours = Neighbours(MPI.COMM_WORLD, ring(nodes, comm.rank), comm.meter) if comm.size > 1 else None
    return PeerCopies(comm, neighbours, CopyPlace(RUN, job, nodes[comm.rank], folder), optimizer, DESCRIPTION)


def found(comm, folder, faults=None, known=lambda record: ""):
    """The newest whole copies in a folder, at which the ranks look together."""
    faults = [] if faults is None else faults
    return find_copies(comm, RUN, (comm.rank, comm.size), folder, known, faults)


def fresh(comm, strategy, **options):
    """An optimizer of the same model with other values."""
    return ShardedAdamW(tiny.make(comm, CONFIG, strategy, seed=7, **options), lr=1e-2)


def on_one(comm, action):
    """Let rank 0 do something to files, while nobody looks at them."""
    comm.barrier()
    if comm.rank == 0:
        action()
    comm.barrier()


def copied(comm, strategy, folder):
    """Copy the state of a training. Returns its progress, and the digests of a checkpoint of it."""
    optimizer, progress = trained(comm, strategy)
    copies = copies_of(optimizer, folder)
    copies.save(progress, "head")
    copies.close()
    return progress, digests(save_checkpoint(folder / "a", optimizer, progress, DESCRIPTION))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_comes_back_bit_by_bit_and_training_goes_on(exact, strategy, ranks_folder):
    progress, expected = copied(exact, strategy, ranks_folder)
    for other in STRATEGIES:
        again = fresh(exact, other, bucket_mb=0.01)
        assert load_copies(exact, found(exact, ranks_folder), again, DESCRIPTION) == progress
        assert digests(save_checkpoint(ranks_folder / "b", again, progress, DESCRIPTION)) == expected
    go_on(again, [2, 3])
    unbroken, _ = trained(SerialComm(), FULL_SHARD, steps=4)
    assert tiny.digest(again.module.state_dict()) == tiny.digest(unbroken.module.state_dict())


@pytest.mark.world(2, 3, 4, 8)
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_one_rank_takes_up_what_many_have_left(mpi, strategy, ranks_folder):
    """And many what one has left, though they agree by another transport."""
    progress, expected = copied(mpi, strategy, ranks_folder)
    alone, mine = SerialComm(), ranks_folder / f"alone{mpi.rank}"
    again = fresh(alone, FULL_SHARD)
    load_copies(alone, found(alone, ranks_folder), again, DESCRIPTION)
    assert digests(save_checkpoint(mine, again, progress, DESCRIPTION)) == expected
    single = copies_of(again, mine)
    single.save(progress, "head")
    single.close()
    many = fresh(mpi, strategy)
    load_copies(mpi, found(mpi, ranks_folder / "alone0"), many, DESCRIPTION)
    assert digests(save_checkpoint(ranks_folder / "c", many, progress, DESCRIPTION)) == expected


@pytest.mark.world(4, 8)
def test_nodes_that_have_all_slices_copy_those_of_the_first(mpi, ranks_folder, monkeypatch):
    monkeypatch.setenv("ZERO_MPI_RANKS_PER_NODE", "2")
    from zero_mpi import MPIComm

    comm = MPIComm(threaded=False)
    optimizer, progress = trained(comm, HYBRID_SHARD)
    copies = copies_of(optimizer, ranks_folder, ranks_per_node=2)
    assert [size > 0 for size in comm.allgather_object(copies.nbytes)] == [
        rank < 2 for rank in range(comm.size)
    ]
    copies.save(progress, "head")
    copies.close()
    expected = digests(save_checkpoint(ranks_folder / "a", optimizer, progress, DESCRIPTION))
    again = fresh(mpi, FULL_SHARD)
    load_copies(mpi, found(mpi, ranks_folder), again, DESCRIPTION)
    assert digests(save_checkpoint(ranks_folder / "b", again, progress, DESCRIPTION)) == expected
    comm.close()


@pytest.mark.world(3, 4, 8)
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
def test_any_host_may_be_lost_and_two_that_are_no_neighbours(mpi, ranks_per_node, ranks_folder):
    optimizer, progress = trained(mpi, FULL_SHARD)
    copies = copies_of(optimizer, ranks_folder, ranks_per_node=ranks_per_node)
    copies.save(progress, "head")
    copies.close()
    nodes = -(-mpi.size // ranks_per_node)
    files = {path: path.read_bytes() for path in ranks_folder.glob("zero_mpi-copy-*")}
    mpi.barrier()
    for first in range(nodes):
        for second in range(nodes):
            lost = {str(first), str(second)}
            on_one(mpi, lambda lost=lost: [p.unlink() for p in files if p.name.split("-")[5] in lost])
            are_neighbours = (first - second) % nodes in (1, nodes - 1)
            assert (found(mpi, ranks_folder) is None) == (are_neighbours or nodes == 1)
            on_one(mpi, lambda: [path.write_bytes(content) for path, content in files.items()])


class Killed(Exception):
    """Stands for the end of a rank."""


@pytest.mark.world(1, 2, 3)
@pytest.mark.parametrize("at", ["begin", "write", "seal"])
def test_whatever_call_a_copy_ends_at_an_older_one_is_whole(mpi, at, ranks_folder, monkeypatch):
    """The last rank ends in the middle of the third copy, in its own files; nobody gets further then."""
    optimizer, _ = trained(mpi, FULL_SHARD)
    copies = copies_of(optimizer, ranks_folder)
    for step in (2, 3):
        copies.save(TrainingProgress(step), f"head {step}")
    if mpi.rank == mpi.size - 1:
        monkeypatch.setattr(CopyFile, at, killed)
        with pytest.raises(Killed):
            copies._write(0, TrainingProgress(4), "head 4")
    else:
        copies._write(0, TrainingProgress(4), "head 4")
    mpi.barrier()
    faults = []
    assert found(mpi, ranks_folder, faults).progress.step == 3
    assert faults == []
    own = CopyPlace(RUN, "01", mpi.rank, ranks_folder).path(mpi.rank, 0)
    is_last = mpi.rank == mpi.size - 1
    assert record_of(own).exists() == (not is_last or at == "begin"), "what is not whole has no record"
    copies.close()


def killed(*args):
    raise Killed


@pytest.mark.world(1, 2, 4)
def test_damage_is_named_and_passed_over(mpi, ranks_folder):
    optimizer, _ = trained(mpi, FULL_SHARD)
    copies = copies_of(optimizer, ranks_folder)
    for step in (2, 3):
        copies.save(TrainingProgress(step), f"head {step}")
    copies.close()
    home = CopyPlace(RUN, "01", 0, ranks_folder).path(0, 1)
    on_one(mpi, lambda: home.write_bytes(bytes(home.stat().st_size)))
    faults = []
    copy = found(mpi, ranks_folder, faults)
    assert copy.progress.step == (2 if mpi.size == 1 else 3), "its keeper has it too"
    assert faults == [f"{home}: its elements are not those that were written (checksum)"]


@pytest.mark.world(1, 2)
def test_copies_of_another_history_or_run_are_not_taken(mpi, ranks_folder):
    optimizer, _ = trained(mpi, FULL_SHARD)
    copies = copies_of(optimizer, ranks_folder)
    for step in (2, 3):
        copies.save(TrainingProgress(step), f"head {step}")
    copies.close()
    faults = []
    known = found(mpi, ranks_folder, faults, lambda record: "not that" * (record.chain != "head 2"))
    assert known.progress.step == 2
    assert faults == ["not that"]
    assert find_copies(mpi, "cd34", (0, 1), ranks_folder, lambda record: "", []) is None


@pytest.mark.world(2, 3)
def test_a_rank_without_room_is_named_on_all_ranks_and_what_is_there_stays(mpi, ranks_folder, monkeypatch):
    optimizer, progress = trained(mpi, FULL_SHARD)
    copies = copies_of(optimizer, ranks_folder)
    copies.save(progress, "head")
    if mpi.rank == 1:
        monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(JobError, match=r"cannot write .*zero_mpi-copy-ab12-01-\d-1-1: No space left"):
        copies.save(TrainingProgress(3), "head")
    assert found(mpi, ranks_folder).progress == progress
    copies.close()


def no_room(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.world(2, 3)
def test_from_the_third_copy_on_nothing_large_is_allocated(mpi, ranks_folder, monkeypatch):
    monkeypatch.setattr(peer_copies, "PIECE", 1 << 12)  # a slice goes in many
    optimizer, progress = trained(mpi, FULL_SHARD)
    copies = copies_of(optimizer, ranks_folder)
    for _ in range(2):
        copies.save(progress, "head")
    mpi.barrier()
    held, slices = sorted(ranks_folder.iterdir()), copies.nbytes
    mpi.barrier()
    tracemalloc.start()
    try:
        copies.save(progress, "head")
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        copies.save(progress, "head")
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    left = sorted(ranks_folder.iterdir())
    copies.remove()
    mpi.barrier()
    assert list(ranks_folder.iterdir()) == []
    assert left == held
    assert peak < slices / 4, f"{peak} bytes at a time, of {slices}"


@pytest.mark.world(1, 2, 4)
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_the_plan_counts_their_room(mpi, strategy, ranks_folder):
    optimizer, _ = trained(mpi, strategy)
    copies = copies_of(optimizer, ranks_folder)
    case = Case(CONFIG, ranks=mpi.size, nodes=mpi.size, strategy_name=strategy.name, peer_checkpoint=5)
    rooms = mpi.allgather_object(copies.room)
    copies.close()
    assert max(rooms) <= planned(case) <= max(rooms) + GAPS * len(optimizer.module.params)


def test_a_copy_s_runs_are_in_the_record_and_the_files_of_a_rank_are_its_slices(mpi, ranks_folder):
    optimizer, progress = trained(mpi, FULL_SHARD)
    copies = copies_of(optimizer, ranks_folder)
    copies.save(progress, "head")
    copies.close()
    copy = found(mpi, ranks_folder)
    total = mpi.allgather_object(copies.nbytes)
    folder = save_checkpoint(ranks_folder / "a", optimizer, progress, DESCRIPTION)
    assert sum(total) == 4 * sum(int(size) for size in tiny_sizes(optimizer)), (
        "parameters and both moments, each once"
    )
    assert len(copy.holders) == mpi.size
    assert {hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES} == set(
        digests(folder)
    )


def tiny_sizes(optimizer):
    """Elements of all that is saved."""
    return [3 * param.size for param in optimizer.module.params.values()]
