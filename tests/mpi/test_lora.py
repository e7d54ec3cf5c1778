"""Adapters of a frozen model: the bits of one process and the traffic of the plan."""

from dataclasses import replace

import pytest
import tiny
from test_plan_exact import case_of, check_traffic

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, SerialComm
from zero_mpi.models.lora import FROZEN, LoRA

MODELS = {
    "llama, head": replace(tiny.MODELS["llama"], lora=LoRA(3, 6.0, ("output.weight", "blk.0.attn_q.weight"))),
    "llama": replace(tiny.MODELS["llama"], lora=LoRA(3, 6.0)),
    "gpt2 tied": replace(
        tiny.MODELS["gpt2 tied"], lora=LoRA(2, 1.0, ("blk.*.attn_qkv.weight", "blk.1.ffn*"))
    ),
}


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda one: one.name)
@pytest.mark.parametrize("name", MODELS)
def test_losses_norms_and_weights(exact, name, strategy):
    options = {"frozen": FROZEN, "micro_batches": 5, "bucket_mb": 0.01}
    alone = tiny.train(SerialComm(), MODELS[name], **options, prefetch=0)
    assert tiny.train(exact, MODELS[name], strategy, **options) == alone
    assert len(set(alone[0])) == 3, "it learns"


@pytest.mark.parametrize("strategy", ["full-shard", "shard-grad-op", "no-shard"])
@pytest.mark.parametrize("name", MODELS)
def test_traffic_is_the_plan_s(mpi, name, strategy):
    check_traffic(mpi, case_of(mpi, MODELS[name], strategy, mpi.size + 1, frozen=FROZEN, bucket_mb=0.03))
