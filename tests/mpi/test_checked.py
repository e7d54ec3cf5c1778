"""`--check-collectives`: the same results, and an error on all ranks that names the first difference."""

import inspect

import numpy as np
import pytest
import tiny
from mpi4py import MPI
from transports import ON_ONE_NODE

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP
from zero_mpi.comm import Comm, Partition
from zero_mpi.comm.guarded import CheckedComm
from zero_mpi.errors import JobError

RANKS = MPI.COMM_WORLD.Get_size()
several = pytest.mark.world(2, 3, 4, 8)
ODD = RANKS - 1
MODEL, STRATEGIES = tiny.MODELS["llama"], (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)


@pytest.fixture(scope="module", params=ON_ONE_NODE)
def checked(request):
    comm = CheckedComm(ON_ONE_NODE[request.param]())
    yield comm
    comm.close()


def test_every_method_is_handed_on():
    """A call of a `Comm` method that the wrapper lacks would not reach the transport."""
    names = [name for name, value in vars(Comm).items() if inspect.isfunction(value) and name[0] != "_"]
    methods = {name for kind in CheckedComm.__mro__ if kind is not Comm for name in vars(kind)}
    methods |= {"sum_vector", "reduce_scatter"}  # `Comm` implements both by allreduce and `_reduce`
    assert [name for name in names if name not in methods] == []


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_the_bits_are_the_same(checked, strategy):
    assert tiny.train(checked, MODEL, strategy) == tiny.train(checked._inner, MODEL, strategy)


def start(comm, number):
    full, part = np.zeros(40, np.float32), Partition(40, comm.size)
    shard = np.zeros(part.counts[comm.rank], np.float32)
    other = Partition(40, comm.size, 3)
    ways = [
        lambda: comm.allgather(shard, full, part, "a"),
        lambda: comm.allgather(shard, full, part, "b"),
        lambda: comm.allgather(None, full, part, "a"),
        lambda: comm.allgather(None, full, other, "a"),
        lambda: comm.reduce_scatter(full, shard, part, label="a"),
        lambda: comm.reduce_scatter(full, shard, part, label="a", contributors=1),
        lambda: comm.reduce_scatter(full, shard, part, label="a", accumulate=True),
        lambda: comm.allreduce(full, "a"),
        lambda: comm.allreduce(full[:39], "a"),
        lambda: comm.allreduce(full.view(np.int32), "a"),
        lambda: comm.broadcast(full, 0, "a"),
        lambda: comm.broadcast(full, comm.size - 1, "a"),
        lambda: comm.sum_vector(np.zeros(3)),
        lambda: comm.sum_vector(np.zeros(4)),
        lambda: comm.barrier(),
        lambda: comm.gather_object(1),
        lambda: comm.broadcast_object(1),
        lambda: comm.broadcast_object(1, comm.size - 1),
        lambda: comm.allgather_object(1),
        lambda: comm.barrier_readers(),
        lambda: comm.background(),
        lambda: comm.memory([part], [40]),
        lambda: comm.memory([part], [41]),
    ]
    return ways[number]()


WAYS = 23


@several
@pytest.mark.parametrize("number", range(WAYS))
def test_any_difference_is_found_before_anything_starts(checked, number):
    """One rank starts another collective: all ranks report the same error, and the transport still works."""
    index = (number + 1) % WAYS if checked.rank == ODD else number
    with pytest.raises(JobError, match="the ranks start different collectives") as error:
        start(checked, index)
    texts = checked.allgather_object(str(error.value))
    assert len(set(texts)) == 1
    others = "rank 0 starts" if RANKS == 2 else f"{RANKS - 1} of {RANKS} ranks start"
    assert f"on rank {ODD}, where {others}" in texts[0]
    assert checked.allgather_object(checked.rank) == list(range(RANKS))


def test_the_background_is_checked_too(checked):
    background = checked.background()
    assert isinstance(background, CheckedComm)
    if RANKS > 1:
        with pytest.raises(JobError, match="gather_object"):
            background.barrier() if background.rank == ODD else background.gather_object(0)
    background.barrier()
    background.close()
