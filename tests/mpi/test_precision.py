"""Training in low precision is bit-identical to one process under every strategy and transport."""

import functools

import numpy as np
import pytest
import tiny

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, SerialComm, UsageError
from zero_mpi.sharding.precision import BF16, FP16, FP64, precision_named

WIDE = precision_named("bf16", "fp32")
PRECISIONS = {"bf16": BF16, "bf16 reduced in fp32": WIDE, "fp16": FP16, "fp64": FP64}
SETTINGS = [  # strategy, prefetch, recompute, bucket MiB, micro-batches a step
    (FULL_SHARD, 1, False, 25, 5),
    (FULL_SHARD, 0, True, 25, 3),
    (SHARD_GRAD_OP, 1, False, 25, 3),
    (NO_SHARD, 1, False, 0.01, 5),
    (NO_SHARD, 0, True, 25, 1),
]


@functools.cache
def alone(name, precision, micro_batches):
    return tiny.train(
        SerialComm(), tiny.MODELS[name], micro_batches=micro_batches, precision=PRECISIONS[precision]
    )


@pytest.mark.parametrize(("strategy", "prefetch", "recompute", "bucket", "micro_batches"), SETTINGS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "gpt2 tied"])
def test_bits(exact, name, precision, strategy, prefetch, recompute, bucket, micro_batches):
    options = {"prefetch": prefetch, "recompute": recompute, "bucket_mb": bucket}
    options |= {"micro_batches": micro_batches, "precision": PRECISIONS[precision]}
    result = tiny.train(exact, tiny.MODELS[name], strategy, **options)
    assert result == alone(name, precision, micro_batches)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_stay_near_those_of_float32(exact, precision):
    records, _ = tiny.train(exact, tiny.MODELS["llama"], precision=PRECISIONS[precision])
    plain, _ = tiny.train(SerialComm(), tiny.MODELS["llama"])
    assert records != plain
    np.testing.assert_allclose([loss for loss, _ in records], [loss for loss, _ in plain], rtol=1e-2)


def test_the_library_adds_no_low_types(fast):
    with pytest.raises(UsageError, match="--reduce-dtype fp32"):
        tiny.make(fast, tiny.MODELS["llama"], precision=BF16)
    records, _ = tiny.train(fast, tiny.MODELS["llama"], precision=WIDE)
    np.testing.assert_allclose(records, alone("llama", "bf16 reduced in fp32", 5)[0], rtol=1e-3)
