"""Timelines of a GPU show when kernels run, not when they are launched."""

import json

import pytest
import tiny
from test_training import transport
from timelines import check_events, lasting

from zero_mpi import FULL_SHARD, NO_SHARD, GradAccum, ShardedAdamW, tracing
from zero_mpi.commands.trace import read, shares
from zero_mpi.sharding.precision import BF16

__all__ = ["transport"]  # a fixture
CONFIG = tiny.MODELS["llama"]


def run(comm, strategy, steps, begin=lambda number: None):
    """Train a few steps in bfloat16 and call `begin` before each; return losses and norms."""
    module = tiny.make(comm, CONFIG, strategy, precision=BF16, bucket_mb=0.01)
    optimizer, accumulator = ShardedAdamW(module, lr=1e-2), GradAccum(module, 3)
    records = []
    for step in range(steps):
        begin(step + 1)
        tiny.run_step(module, accumulator, CONFIG, step, 3)
        records.append((accumulator.total_loss(), optimizer.step(max_norm=1.0).grad_norm))
    return records


@pytest.mark.world(2, 3)
@pytest.mark.timeout_seconds(120)
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD], ids=lambda s: s.name)
def test_a_run_on_the_gpu(gpu, transport, strategy, tmp_path, monkeypatch):
    expected = run(transport, strategy, 2)
    monkeypatch.setenv("PRETEND_CUPY_DELAY", "0.0005")
    with tracing(transport, tmp_path / "trace.json") as timeline:
        assert run(transport, strategy, 2, timeline.step) == expected
    if transport.rank:
        return
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_events(events)
    recorded = read(tmp_path / "trace.json")
    assert recorded.steps == [1, 2]
    for share in shares(recorded):
        assert sum(share.columns.values()) == pytest.approx(sum(share.steps.values()), rel=1e-9)
        assert all(share.columns[name] > 0 for name in ("compute", "optimizer", "exposed"))
    stalls = [event for event in lasting(events) if event["cat"] == "stalls"]
    assert {event["args"]["what"] for event in stalls} >= {"gradients"}
