"""Training on a frozen base in GGUF blocks is bit-identical to training on the same base in floats."""

from dataclasses import replace

import pytest
import tiny_blocks
from test_nodes import per_node, transport
from test_plan_exact import (
    EVERY_STRATEGY,
    PER_NODE,
    STRATEGIES,
    apart,
    case_of,
    check_memory,
    check_traffic,
)
from transports import ON_SEVERAL

from zero_mpi import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, SerialComm
from zero_mpi.models.lora import FROZEN
from zero_mpi.sharding.precision import BF16, FP32

__all__ = ["apart"]  # a fixture


MODELS = {
    "tied": {"tied": True},
    "own head": {"tied": False},
    "experts": {"tied": True, **tiny_blocks.EXPERTS},
}


@pytest.fixture(scope="module", params=MODELS)
def base(request):
    return tiny_blocks.base(**MODELS[request.param])


@pytest.fixture(scope="module")
def floats(base):
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


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda one: one.name)
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP], ids=lambda one: one.name)
def test_experts_in_several_units(exact, floats, base, strategy, precision):
    """Each unit has two quantized experts and the last has one; the layer's unit has the adapters."""
    actual = tiny_blocks.train(exact, *base, strategy, precision=precision, bucket_mb=0.35)
    assert actual == floats[precision.name]


@pytest.mark.parametrize("kind", ON_SEVERAL)
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD, NO_SHARD], ids=lambda one: one.name)
def test_on_several_nodes(base, floats, strategy, kind):
    for ranks in per_node():
        with transport(kind, ranks) as comm:
            assert tiny_blocks.train(comm, *base, strategy) == floats["fp32"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_memory_and_traffic_are_the_plan_s(mpi, base, strategy, prefetch):
    case = case_of(mpi, base[0], strategy, mpi.size + 1, frozen=FROZEN, prefetch=prefetch, async_save=True)
    check_traffic(mpi, case)
    check_memory(mpi, case)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_in_bfloat16_and_in_shared_memory(exact, base, strategy):
    case = case_of(exact, base[0], strategy, 2 * exact.size, frozen=FROZEN, precision_name="bf16")
    check_memory(exact, replace(case, async_save=True))


@pytest.mark.world(4, 8)
@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_memory_and_traffic_over_nodes(apart, base, strategy):
    nodes = apart.size // PER_NODE
    case = case_of(apart, base[0], strategy, apart.size + 1, nodes=nodes, frozen=FROZEN)
    check_memory(apart, replace(case, async_save=True))
    check_traffic(apart, case)
