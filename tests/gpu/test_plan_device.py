"""The plan's GPU memory equals that of the pools after real steps."""

from dataclasses import replace

import numpy as np
import pytest
import tiny

from zero_mpi import GradAccum, SerialComm, ShardedAdamW, ShardedModule, device
from zero_mpi.device import arrays
from zero_mpi.models import GPT2, Llama
from zero_mpi.nn import CrossEntropy
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import plan_memory
from zero_mpi.plan.simulate import simulate
from zero_mpi.plan.traffic import plan_traffic

SIZES = {"layers": 2, "dim": 64, "heads": 4, "ffn": 96, "context": 48, "vocab_size": 301}
MODELS = {
    "llama": Llama.from_flags(SIZES | {"kv_heads": 2, "tied": False}),
    "gpt2": GPT2.from_flags(SIZES | {"tied": True}),
}


def planned(case):
    before = device.in_use()
    plans = simulate(case), plan_memory(case)
    assert device.in_use() is before
    return plans


def train(case, rounds):
    pool = arrays.Recycler(device.in_use())
    device.in_use().activations = pool
    module = ShardedModule(
        case.model.stages(case.recompute), SerialComm(), case.strategy, precision=case.precision
    )
    module.initialize(0)
    optimizer, accumulator = ShardedAdamW(module, offload=case.offload), GradAccum(module, rounds)
    shape = case.micro_batch, case.context + 1
    tokens = np.random.default_rng(0).integers(case.model.vocab_size, size=shape)
    for _ in range(2):
        for _ in range(rounds):
            accumulator.accumulate(tokens[:, :-1], CrossEntropy(tokens[:, 1:], 1.0 / case.tokens))
        module.sync_gradients()
        module.zero_gradients()
    return module, optimizer, pool.nbytes


@pytest.fixture
def own_attention(monkeypatch):
    monkeypatch.setenv("ZERO_MPI_GPU_ATTENTION", "own")


@pytest.fixture(autouse=True)
def pools_stay():
    gpu = device.in_use()
    pool = gpu.activations
    yield
    gpu.activations = pool


@pytest.mark.world(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_layers_on_fakes_take_what_those_on_a_gpu_take(gpu, own_attention, name, recompute, precision):
    options = {"batch_size": 4, "micro_batch": 2, "context": 48, "recompute": recompute}
    case = Case(MODELS[name], **options, device="cuda", precision_name=precision)
    seen, memory = planned(case)
    module, optimizer, recycled = train(case, 2)
    assert seen.recycled == recycled
    assert memory.gradient_buffers == module.gradient_pool.nbytes
    assert memory.moments == optimizer.memory_bytes()
    shards = [unit.parameters.shard for unit in module.units]
    if module.precision.is_low:
        assert memory.masters == sum(unit.parameters.master_shard.nbytes for unit in module.units)
    assert memory.parameters == sum(array.nbytes for array in shards)


@pytest.mark.world(1)
@pytest.mark.parametrize("name", MODELS)
def test_sums_that_are_large_enough_to_be_recycled(gpu, own_attention, name):
    sizes = {"block_count": 1, "embedding_length": 128, "context_length": 128}
    model = replace(
        MODELS[name], **sizes | ({"key_length": 32, "value_length": 32} if name == "llama" else {})
    )
    case = Case(model, batch_size=4, micro_batch=4, context=128, device="cuda", precision_name="bf16")
    seen, _ = planned(case)
    assert seen.recycled == train(case, 1)[2]


@pytest.mark.world(1)
@pytest.mark.parametrize("name", MODELS)
def test_what_cudnn_takes(gpu, monkeypatch, name):
    from zero_mpi.ops.gpu.sdpa import sdpa

    if sdpa()[0] is None or not hasattr(sdpa()[0].cudnn, "refuses"):
        pytest.skip("needs the simulated cuDNN: the bytes that a real one allocates are unknown")
    case = Case(MODELS[name], batch_size=4, micro_batch=4, context=48, device="cuda", precision_name="bf16")
    built = sdpa()[0].cudnn.calls.built
    monkeypatch.setattr(sdpa()[0], "graphs", {})
    assert planned(case)[0].recycled == train(case, 1)[2]
    assert sdpa()[0].cudnn.calls.built > built


@pytest.mark.world(1)
@pytest.mark.parametrize("how", ["moments", "state"])
def test_what_is_offloaded(gpu, own_attention, how):
    case = Case(MODELS["gpt2"], device="cuda", precision_name="bf16", offload=how, context=48)
    _, memory = planned(case)
    options = {"precision": case.precision, "offload_masters": how == "state"}
    module = ShardedModule(case.model.stages(), SerialComm(), case.strategy, **options)
    optimizer = ShardedAdamW(module, offload=how)
    moments, buffers = tiny.offloaded_bytes(optimizer)
    masters = sum(shard.nbytes for shard in module.parameters())
    assert memory.rooms == buffers
    assert memory.host == moments + masters * (how == "state")
    assert memory.masters == masters * (how == "moments")


@pytest.mark.world(2, 3)
@pytest.mark.parametrize(("precision", "exact"), [("fp32", True), ("bf16", True), ("fp32", False)])
@pytest.mark.parametrize("transport", ["staged", "mpi", "nccl"])
def test_bytes_and_rooms_of_transfers(gpu, own_attention, transport, precision, exact):
    """Sent bytes equal the plan, and the transfers' buffers take no more memory than planned."""
    from zero_mpi.comm import kinds
    from zero_mpi.comm.gpu import select as device_choice

    comm = device_choice.make(kinds.asked_for(transport, on_gpu=True)[0], exact=exact)
    sizes = {"ranks": comm.size, "batch_size": comm.size + 1, "micro_batch": 1, "context": 48}
    case = Case(MODELS["gpt2"], **sizes, transport_wanted=transport, device="cuda", precision_name=precision)
    case = replace(case, exact_wanted=exact)
    assert (case.transport, case.exact) == (comm.kind, comm.exact)
    _, plan = planned(case)
    module = ShardedModule(case.model.stages(), comm, case.strategy, precision=case.precision)
    module.initialize(0)
    optimizer, accumulator = ShardedAdamW(module), GradAccum(module, comm.size + 1)
    tokens, before = np.zeros((1, 48), np.int64), comm.meter.sent_bytes
    for number in accumulator:
        idle = number is None
        accumulator.accumulate(None if idle else tokens, None if idle else CrossEntropy(tokens, 1e-2))
    accumulator.total_loss()
    optimizer.step(max_norm=1.0)
    assert comm.meter.sent_bytes - before == plan_traffic(case, flags=0).sent[comm.rank]
    buffers = [array for group in comm._buffers.values() for buffer in group for array in buffer]
    buffers += [buffer for group in comm._arrivals.values() for buffer in group]
    assert 0 < sum(array.nbytes for array in buffers) <= plan.transport
    assert (plan.host > 0) == (transport == "staged")
    if transport == "staged":
        stages = [stage for ring in comm.backend._rings for stage in ring]
        assert 0 < sum(stage.up.nbytes + stage.down.nbytes for stage in stages) <= plan.host
    if comm.rank == 0:
        assert plan.gathered == module.parameter_pool.nbytes
        assert plan.gradient_buffers == module.gradient_pool.nbytes
        assert plan.moments == optimizer.memory_bytes()
    comm.close()
