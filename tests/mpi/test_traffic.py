"""Tests of the order of a step's collectives under each strategy."""

import pytest
import tiny
from recording import RecordingComm

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, GradAccum, ShardedAdamW

NAMES = ["token_embd", "blk.0", "blk.1", "output"]


def recorded(comm, config, strategy, **options):
    comm = RecordingComm(comm)
    module = tiny.make(comm, config, strategy, **options)
    optimizer = ShardedAdamW(module)
    accumulator = GradAccum(module, comm.size)
    comm.log.clear()
    before = comm.inner.meter.sent_bytes
    tiny.run_step(module, accumulator, config, 0, comm.size)
    optimizer.step()
    total = comm.inner.meter.sent_bytes - before
    assert total == sum(event.sent for event in comm.log), "differs from the meter"
    return [event for event in comm.log if event.label != "vector"], module


def starts(events, kind):
    return [event.label for event in events if event.kind == kind]


def parameters(*names):
    return [f"parameters {name}" for name in names]


def gradients(*names):
    return [f"gradients {name}" for name in names]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_full_shard_gathers_twice_but_the_last_once(mpi, prefetch):
    events, _ = recorded(mpi, tiny.MODELS["llama"], FULL_SHARD, prefetch=prefetch)
    # The backward of the embedding does not read the weights, so they are not gathered for it.
    assert starts(events, "allgather") == parameters(*NAMES, "blk.1", "blk.0")
    assert starts(events, "reduce_scatter") == gradients(*reversed(NAMES))
    assert {event.kind for event in events} == {"allgather", "reduce_scatter", "wait"}


def test_full_shard_order_of_starts_and_waits(mpi):
    events, _ = recorded(mpi, tiny.MODELS["llama"], FULL_SHARD, prefetch=1)
    order = [(event.kind, event.label) for event in events if event.label.startswith("parameters")]
    embedding, first, second, head = parameters(*NAMES)
    assert order == [
        ("allgather", embedding), ("allgather", first), ("wait", embedding),
        ("allgather", second), ("wait", first),
        ("allgather", head), ("wait", second),
        ("wait", head),
        ("allgather", second),  # backward of the head, which is still gathered: the gather of blk.1 starts
        ("allgather", first), ("wait", second),
        ("wait", first),
    ]  # fmt: skip


def test_reductions_start_while_earlier_layers_have_yet_to_compute(mpi):
    events, _ = recorded(mpi, tiny.MODELS["llama"], FULL_SHARD, prefetch=0)
    reduced = events.index(next(e for e in events if e.label == "gradients output"))
    waited = next(i for i, e in enumerate(events) if e.kind == "wait" and e.label == "gradients output")
    later = [e.label for e in events[reduced + 1 : waited]]
    assert "gradients blk.1" in later


def test_shard_grad_op_gathers_once_after_the_update(mpi):
    events, _ = recorded(mpi, tiny.MODELS["llama"], SHARD_GRAD_OP)
    assert starts(events, "allgather") == parameters(*NAMES)
    kinds = [event.kind for event in events if event.kind != "wait"]
    assert kinds == ["reduce_scatter"] * 4 + ["allgather"] * 4


def test_no_shard_gathers_no_parameters(mpi):
    events, module = recorded(mpi, tiny.MODELS["llama"], NO_SHARD, bucket_mb=0.03)
    buckets = gradients(*(f"bucket {number}" for number in range(len(module.units))))
    assert len(buckets) > 3
    assert starts(events, "reduce_scatter") == starts(events, "allgather") == buckets
    assert next(iter(module.units[0].unit.params)) == "output.weight"
