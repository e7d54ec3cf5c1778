"""Steps on the GPU have results near the host's, bit-identical at any number of ranks."""

import functools

import numpy as np
import pytest
import tiny

from zero_mpi import (
    FULL_SHARD,
    HYBRID_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    GradAccum,
    SerialComm,
    ShardedAdamW,
    device,
)
from zero_mpi.nn import CrossEntropy
from zero_mpi.sharding.precision import BF16, FP16, FP32, precision_named

PRECISIONS = {
    "fp32": FP32,
    "bf16": BF16,
    "bf16 reduced in fp32": precision_named("bf16", "fp32"),
    "fp16": FP16,
}
MODELS = tiny.MODELS | tiny.OTHERS
TRAINED = [("llama", precision) for precision in PRECISIONS]
TRAINED += [(name, precision) for name in MODELS if name != "llama" for precision in ("fp32", "bf16")]
NEAR = {"fp32": 1e-5}  # precision -> relative tolerance of figures against the host; otherwise 1e-2


@functools.cache
def on_the_host(name, precision):
    before = device.in_use()
    device.adopt(device.HOST)
    try:
        return tiny.train(SerialComm(), MODELS[name], precision=PRECISIONS[precision])
    finally:
        device.adopt(before)


@functools.cache
def alone(name, precision):
    return tiny.train(SerialComm(), MODELS[name], precision=PRECISIONS[precision])


@pytest.mark.world(1)
@pytest.mark.parametrize(("name", "precision"), TRAINED)
def test_losses_are_near_those_of_the_host(gpu, name, precision):
    actual, expected = alone(name, precision)[0], on_the_host(name, precision)[0]
    tolerance = NEAR.get(precision, 1e-2)
    np.testing.assert_allclose([loss for loss, _ in actual], [loss for loss, _ in expected], rtol=tolerance)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    "options", [{"strategy": NO_SHARD}, {"strategy": SHARD_GRAD_OP}, {"recompute": True}]
)
def test_strategies_and_recomputation_change_no_bit(gpu, options):
    options = {"strategy": FULL_SHARD, "precision": BF16} | options
    assert tiny.train(SerialComm(), tiny.MODELS["llama"], **options) == alone("llama", "bf16")


@pytest.mark.world(1)
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda s: s.name)
def test_a_step_waits_for_two_copies_from_the_gpu(gpu, strategy, monkeypatch):
    """A step copies only losses and sums of squares to the host, because the GPU idles during each copy."""
    module = tiny.make(SerialComm(), tiny.MODELS["gpt2"], strategy, bucket_mb=0.01)
    optimizer, accumulator = ShardedAdamW(module), GradAccum(module, 3)
    assert len(module.units) > 2
    copies = []
    to_host = gpu.to_host
    monkeypatch.setattr(gpu, "to_host", lambda x: copies.append(x) or to_host(x))
    for step in range(2):
        tiny.run_step(module, accumulator, tiny.MODELS["gpt2"], step, 3)
        accumulator.total_loss()
        assert optimizer.step(max_norm=1.0).grad_norm > 0
        assert len(copies) == 2 * (step + 1)


@pytest.mark.world(1)
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_micro_batches_change_no_bit(gpu, strategy, precision, monkeypatch):
    do, queue = getattr(type(gpu.stream), "do", None), []  # only a simulated stream has `do`
    if do is not None:
        monkeypatch.setattr(
            type(gpu.stream), "do", lambda stream, work: queue.append(work) or do(stream, work)
        )

    def run():
        module = tiny.make(SerialComm(), MODELS["gpt2"], strategy, precision=PRECISIONS[precision])
        optimizer, accumulator = ShardedAdamW(module, lr=1e-2), GradAccum(module, 2)
        results, calls = [], []
        for step in range(6):
            for number in accumulator:
                x, targets = tiny.micro_batch(step, number, MODELS["gpt2"], 2)
                queue.clear()
                accumulator.accumulate(x, CrossEntropy(targets, 0.1))
                calls.append(len(queue))
            results.append((accumulator.total_loss(), optimizer.step(max_norm=1.0).grad_norm))
        return (results, tiny.digest(module.state_dict())), calls

    expected, plain = run()
    monkeypatch.setenv("ZERO_MPI_GPU_GRAPH", "1")
    monkeypatch.setenv("PRETEND_CUPY_DELAY", "0.0005")
    results, calls = run()
    assert results == expected
    if do is not None:
        assert min(plain) > 100
        assert max(calls[-4:]) < 10  # two uploads, the graph, the loss


@pytest.fixture(scope="module", params=["staged", "mpi"])
def transport(request, the_gpu):
    from zero_mpi.comm import kinds
    from zero_mpi.comm.gpu import select as device_choice

    device.adopt(the_gpu)
    comm = device_choice.make(kinds.asked_for(request.param, on_gpu=True)[0], exact=True)
    yield comm
    comm.close()


@pytest.mark.world(2, 3)
@pytest.mark.timeout_seconds(200)
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_are_those_of_one_rank(gpu, transport, precision, strategy, monkeypatch):
    expected = alone("llama", precision)
    monkeypatch.setenv("PRETEND_CUPY_DELAY", "0.0005")
    options = {"precision": PRECISIONS[precision], "bucket_mb": 0.01}
    assert tiny.train(transport, tiny.MODELS["llama"], strategy, **options) == expected


@pytest.mark.world(2, 3)
def test_hybrid_sharding_on_one_node_is_full_sharding(gpu, transport):
    assert tiny.train(transport, tiny.MODELS["gpt2"], HYBRID_SHARD) == alone("gpt2", "fp32")
