"""Training on several nodes is bit-identical to one process.

Groups of ranks of this machine count as nodes (`ZERO_MPI_RANKS_PER_NODE`); tests/cluster uses separate hosts.
"""

import random
import time
from contextlib import contextmanager

import numpy as np
import pytest
import tiny
from test_shared import Dawdling, restless
from transports import ON_SEVERAL

from zero_mpi import FULL_SHARD, HYBRID_SHARD, MPIComm, SerialComm
from zero_mpi.comm import Partition
from zero_mpi.comm.nodes import sums
from zero_mpi.comm.nodes.comm import NodesComm
from zero_mpi.comm.nodes.hybrid import ShardGroup
from zero_mpi.comm.shared.memory import MPI, NodesApart
from zero_mpi.comm.topology import PRETEND, Topology
from zero_mpi.errors import UsageError
from zero_mpi.models import Llama
from zero_mpi.sharding.precision import BF16
from zero_mpi.sharding.strategy import STRATEGIES

WORLD = MPI.COMM_WORLD
DEEP = Llama.from_flags(tiny.LLAMA | {"layers": 5, "tied": True})
ORDINARY, MANY_CHUNKS = sums.chain_chunk(2), 700  # chunk sizes in elements: the usual one, and a small one


@contextmanager
def nodes_of(ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PRETEND, str(ranks))
        yield


@contextmanager
def transport(kind, ranks, **options):
    """Open a transport over nodes: `shared` has memory within a node, `mpi` sends messages only."""
    with nodes_of(ranks):
        comm = ON_SEVERAL[kind](**options)
        yield comm
        comm.close()


def per_node():
    return [count for count in (2, 4) if WORLD.size % count == 0 and WORLD.size > count]


def values(rank, length, round_=0):
    return np.random.default_rng([rank, length, round_]).standard_normal(length, np.float32)


def in_order(length, contributors, rounds):
    total = np.zeros(length, np.float32)
    for round_ in range(rounds):
        for rank in range(contributors):
            term = values(rank, length, round_)
            total = term if rank == round_ == 0 else total + term
    return total


def reduce_rounds(comm, length, contributors, rounds, pool, dawdle):
    partition = Partition(length, comm.size, 16)
    out = np.full(partition.counts[comm.rank], np.nan, np.float32)
    for round_ in range(rounds):
        buffer = pool.take(length)
        full = buffer[:length]
        time.sleep(dawdle.random() * 2e-3)
        full[:] = values(WORLD.rank, length, round_)
        comm.reduce_scatter(full, out, partition, contributors=contributors, accumulate=round_ > 0).wait()
        pool.give(buffer)
    return out, partition.part(comm.rank)


SUMS = [(5000, 1), (4096, 3), (1, 2), (40, 2), (0, 1), (100_000, 2)]


def check_sums(comm, group):
    dawdle = random.Random(WORLD.rank)
    for length, rounds in SUMS:
        pool = group.memory([], [length + 1000]).buffers
        for contributors in range(1, comm.size + 1):
            out, part = reduce_rounds(group, length, contributors, rounds, pool, dawdle)
            assert out.tobytes() == in_order(length, contributors, rounds)[part].tobytes()
        del pool


@pytest.mark.world(2, 3, 4, 8)
@pytest.mark.parametrize("kind", ON_SEVERAL)
@pytest.mark.parametrize("piece", [ORDINARY, MANY_CHUNKS])
def test_sums_are_those_of_the_order_of_ranks_in_the_world_and_on_every_node(monkeypatch, kind, piece):
    monkeypatch.setattr(sums, "chain_chunk", lambda nodes: piece)
    for ranks in per_node() if kind == "shared" else [1, *per_node()]:
        with transport(kind, ranks) as comm:
            owners = comm.shard_group()
            assert (type(owners), owners.size) == (ShardGroup, ranks)
            check_sums(comm, owners)
            if kind == "shared":
                check_sums(comm, comm)
        assert not any((owners.sums.lane, owners.sums.node))  # they are freed


@pytest.mark.world(4, 8)
def test_what_is_gathered_lies_once_a_node_and_is_not_overwritten_while_it_is_read():
    dawdle = random.Random(WORLD.rank)
    for ranks in per_node():
        with transport("shared", ranks) as comm:
            pool = comm.memory([], [], [3000, 5000]).gathers
            for number in range(12):
                length = (2900, 5000)[number % 2]
                partition = Partition(length, comm.size, 16)
                full = values(number, length)
                buffer = pool.take(length)
                comm.allgather(full[partition.part(comm.rank)], buffer[:length], partition).wait()
                time.sleep(dawdle.random() * 3e-3)
                assert buffer[:length].tobytes() == full.tobytes()
                pool.give(buffer)
            spare = [pool.take(5000) for _ in range(3)]  # the pool shares fewer, so some are private
            handles = [comm.allgather(full[partition.part(comm.rank)], room, partition) for room in spare]
            for room, handle in zip(spare, handles, strict=True):
                handle.wait()
                assert room.tobytes() == full.tobytes()
                pool.give(room)
            del pool, spare, buffer, room


@pytest.mark.world(2, 3, 4, 8)
@pytest.mark.timeout_seconds(300)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
@pytest.mark.parametrize("kind", ON_SEVERAL)
def test_training_has_the_bits_of_one_process(strategy, kind):
    options = [
        {"micro_batches": 5, "prefetch": 1},
        {"micro_batches": 9, "prefetch": 2, "recompute": True},
        {"micro_batches": 1, "prefetch": 0},
        {"micro_batches": 3, "frozen": ["token_embd*", "blk.0.*"]},
        {"micro_batches": 5, "precision": BF16},
    ]
    for ranks in per_node() if kind == "shared" else [1, *per_node()]:
        with transport(kind, ranks) as comm:
            for option in options:
                assert tiny.train(comm, DEEP, strategy, **option) == alone(**option)


@pytest.mark.world(4, 8)
@pytest.mark.timeout_seconds(300)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
@pytest.mark.parametrize("micro_batches", [1, 5])
def test_ranks_that_dawdle_change_nothing(strategy, micro_batches):
    """With one micro-batch, the ranks of all nodes but the first only receive data."""
    options = {"micro_batches": micro_batches, "bucket_mb": 0.01}
    expected = restless(SerialComm(), DEEP, strategy, **options)
    for ranks in per_node():
        with transport("shared", ranks) as comm:
            assert restless(Dawdling(comm, micro_batches), DEEP, strategy, **options) == expected


@pytest.mark.world(4, 8)
@pytest.mark.timeout_seconds(300)
def test_a_thread_may_push_it_all(monkeypatch):
    monkeypatch.setattr(sums, "chain_chunk", lambda nodes: MANY_CHUNKS)
    for kind, strategy in [("shared", FULL_SHARD), ("shared", HYBRID_SHARD), ("mpi", HYBRID_SHARD)]:
        with transport(kind, 2, threaded=True) as comm:
            assert tiny.train(comm, DEEP, strategy, micro_batches=9) == alone(micro_batches=9)


KNOWN = {}


def alone(**options):
    key = repr(sorted(options.items()))
    if key not in KNOWN:
        KNOWN[key] = tiny.train(SerialComm(), DEEP, **options)
    return KNOWN[key]


@pytest.mark.world(4, 8)
def test_ranks_in_turn_on_the_nodes_are_refused():
    turn = Topology(tuple(tuple(range(n, WORLD.size, 2)) for n in range(2)), WORLD.rank)
    assert "not consecutive" in turn.problem
    ragged = Topology(((0,), tuple(range(1, WORLD.size))), WORLD.rank)
    assert "unequal numbers" in ragged.problem
    with nodes_of(3), pytest.raises(NodesApart, match="unequal numbers of ranks"):
        NodesComm()
    with nodes_of(3):
        comm = MPIComm()
        with pytest.raises(UsageError, match="hybrid-shard: the nodes have unequal numbers"):
            comm.shard_group()
        comm.close()
