"""Every strategy is bit-identical to a run in one process, at every number of ranks."""

import functools
from dataclasses import replace

import architectures
import numpy as np
import pytest
import tiny
from test_shared import spoil_what_is_given_back

from zero_mpi import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, SerialComm
from zero_mpi.models.lora import FROZEN
from zero_mpi.sharding.precision import BF16, FP32

# strategy, prefetch, recompute, bucket MiB, micro-batches a step: every pair of choices occurs
COVERING = [
    (FULL_SHARD, 0, False, 25, 5),
    (FULL_SHARD, 1, True, 0.01, 3),
    (FULL_SHARD, 2, False, 25, 1),
    (FULL_SHARD, 2, True, 0.01, 9),
    (SHARD_GRAD_OP, 0, True, 0.01, 1),
    (SHARD_GRAD_OP, 1, False, 25, 9),
    (SHARD_GRAD_OP, 2, True, 25, 3),
    (SHARD_GRAD_OP, 2, False, 0.01, 5),
    (NO_SHARD, 0, False, 0.01, 9),
    (NO_SHARD, 1, True, 0.04, 5),
    (NO_SHARD, 2, False, 0.01, 3),
    (NO_SHARD, 1, False, 25, 1),
    (NO_SHARD, 0, True, 25, 3),
]


@functools.cache
def alone(name, micro_batches):
    return tiny.train(SerialComm(), tiny.MODELS[name], micro_batches=micro_batches, prefetch=0)


# Every model with every row; a third of the rows, different for each model, comes first.
ROWS = [(place, name, *row) for i, name in enumerate(tiny.MODELS) for place, row in enumerate(COVERING, i)]
ROWS = [tuple(row) for _, *row in sorted(ROWS, key=lambda row: row[0] % 3 > 0)]


@pytest.mark.parametrize(("name", "strategy", "prefetch", "recompute", "bucket", "micro_batches"), ROWS)
def test_losses_norms_and_weights(exact, name, strategy, prefetch, recompute, bucket, micro_batches):
    options = {"prefetch": prefetch, "recompute": recompute, "bucket_mb": bucket}
    result = tiny.train(exact, tiny.MODELS[name], strategy, micro_batches=micro_batches, **options)
    assert result == alone(name, micro_batches)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("arch", tiny.OTHERS)
def test_other_architectures(exact, arch, recompute):
    config, strategy = tiny.OTHERS[arch], NO_SHARD if recompute else FULL_SHARD
    actual = tiny.train(exact, config, strategy, steps=2, recompute=recompute)
    assert actual == alone_of(arch)


@functools.cache
def alone_of(arch):
    return tiny.train(SerialComm(), tiny.OTHERS[arch], steps=2, prefetch=0)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
def test_fast_reductions_stay_close(fast, strategy):
    records, _ = tiny.train(fast, tiny.MODELS["gpt2 tied"], strategy)
    np.testing.assert_allclose(records, alone("gpt2 tied", 5)[0], rtol=1e-5)


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_frozen_parameters_change_nothing_else(exact, strategy):
    options = {"frozen": ["token_embd*", "blk.0.*"], "micro_batches": 3}
    config = tiny.MODELS["llama"]
    assert tiny.train(exact, config, strategy, **options) == tiny.train(SerialComm(), config, **options)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda one: one.name)
@pytest.mark.parametrize("name", tiny.ADAPTED)
def test_adapters_of_a_frozen_model(exact, name, strategy):
    options = {"frozen": FROZEN, "micro_batches": 5, "bucket_mb": 0.01}
    expected = tiny.train(SerialComm(), tiny.ADAPTED[name], **options, prefetch=0)
    assert tiny.train(exact, tiny.ADAPTED[name], strategy, **options) == expected
    assert len(set(expected[0])) == 3, "losses must differ"


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda one: one.name)
def test_rates_by_name_are_the_same_wherever_slices_end(exact, strategy):
    """The patterns alternate within units, and shards begin and end inside parameters."""
    options = {"bucket_mb": 0.02, "update": {"lr_scale": {"blk.*": 0.5, "*norm*": 3.0, "*ffn_up*": 0.0}}}
    actual = tiny.train(exact, tiny.MODELS["llama"], strategy, **options)
    assert actual == tiny.train(SerialComm(), tiny.MODELS["llama"], **options)
    assert actual[1] != alone("llama", 5)[1]


def test_row_sharding_has_the_bits_of_row_sharding_alone(exact):
    config = tiny.MODELS["llama"]
    assert tiny.train(exact, config, by_rows=True) == tiny.train(SerialComm(), config, by_rows=True)
    assert tiny.train(exact, config, by_rows=True)[0][0][0] == alone("llama", 5)[0][0][0]


@pytest.mark.parametrize("name", ["llama", "gpt2 tied"])
def test_nothing_reads_a_buffer_that_was_given_back(exact, name, monkeypatch):
    spoil_what_is_given_back(monkeypatch)
    assert tiny.train(exact, tiny.MODELS[name], prefetch=2) == alone(name, 5)


MIXTURES = tiny.OTHERS | {"mixtral": replace(tiny.MODELS["llama"], expert_count=5, expert_used_count=2)}
# architecture, strategy, precision, recompute: every pair of the last three occurs
ROUTED = [
    ("qwen3moe", FULL_SHARD, BF16, True),
    ("olmoe", SHARD_GRAD_OP, BF16, False),
    ("granitemoe", NO_SHARD, BF16, True),
    ("mixtral", HYBRID_SHARD, FP32, True),
    ("olmoe", FULL_SHARD, FP32, False),
    ("qwen3moe", NO_SHARD, FP32, False),
    ("granitemoe", SHARD_GRAD_OP, FP32, True),
]


@pytest.mark.parametrize(("arch", "strategy", "precision", "recompute"), ROUTED)
def test_mixtures_with_their_losses(exact, arch, strategy, precision, recompute):
    options = {"steps": 2, "precision": precision, "auxiliary": {"balance_loss": 0.1, "z_loss": 0.01}}
    actual = tiny.train(exact, MIXTURES[arch], strategy, recompute=recompute, **options)
    assert actual == tiny.train(SerialComm(), MIXTURES[arch], **options)


# Experts of 32 x 32: two in each unit and one in the last.
CUT = {"embedding_length": 32, "feed_forward_length": 32}
IN_PARTS = {
    "qwen3moe": architectures.build("qwen3moe", tiny.SIZES | CUT),
    "granitemoe": architectures.build("granitemoe", tiny.SIZES | CUT),
}
PART_MB = 0.03
BALANCED = {"steps": 2, "auxiliary": {"balance_loss": 0.1, "z_loss": 0.01}}


@functools.cache
def alone_in_parts(arch, precision):
    return tiny.train(SerialComm(), IN_PARTS[arch], precision=precision, **BALANCED)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda one: one.name)
@pytest.mark.parametrize(
    "strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD], ids=lambda s: s.name
)
def test_experts_in_several_units(exact, strategy, precision, recompute):
    options = {"precision": precision, "recompute": recompute, "bucket_mb": PART_MB}
    for prefetch, arch in enumerate(IN_PARTS):
        actual = tiny.train(exact, IN_PARTS[arch], strategy, prefetch=prefetch, **options, **BALANCED)
        assert actual == alone_in_parts(arch, precision)


def test_experts_lie_in_several_units(exact):
    module = tiny.make(exact, IN_PARTS["qwen3moe"], bucket_mb=PART_MB)
    homes = [unit for unit in module.units if "blk.0.ffn_up_exps.weight" in unit.unit.params]
    assert [unit.unit.params["blk.0.ffn_up_exps.weight"].shape[0] for unit in homes] == [2, 2, 1]
    plain = tiny.make(exact, IN_PARTS["qwen3moe"])
    assert "blk.0.ffn_up_exps.weight[2:4]" in module.shard_info()
    assert tiny.digest(module.state_dict()) == tiny.digest(plain.state_dict())
