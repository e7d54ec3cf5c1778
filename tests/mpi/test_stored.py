"""A frozen base in the blocks of its file: the bits of the same base in floats, wherever bytes travel."""

import pytest
import tiny_blocks
from test_nodes import per_node, transport

from zero_mpi import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, SerialComm
from zero_mpi.sharding.precision import BF16, FP32


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "own head"])
def base(request):
    """A model and its bytes."""
    return tiny_blocks.base(request.param)


@pytest.fixture(scope="module")
def floats(base):
    """What one process gives with the base in floats."""
    return {
        kind.name: tiny_blocks.train(SerialComm(), *base, stored=False, precision=kind)
        for kind in (FP32, BF16)
    }


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda one: one.name)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_losses_norms_and_weights(exact, base, floats, strategy, prefetch):
    assert tiny_blocks.train(exact, *base, strategy, prefetch=prefetch) == floats["fp32"]


def test_bfloat16_rounds_what_is_unpacked(exact, base, floats):
    assert tiny_blocks.train(exact, *base, precision=BF16) == floats["bf16"]


@pytest.mark.parametrize("kind", ["shared", "mpi"])
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD, NO_SHARD], ids=lambda one: one.name)
def test_on_several_nodes(base, floats, strategy, kind):
    for ranks in per_node():
        with transport(kind, ranks) as comm:
            assert tiny_blocks.train(comm, *base, strategy) == floats["fp32"]
