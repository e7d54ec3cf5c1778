"""Timelines have every transfer with its bytes, every wait and one clock for all ranks, and change no bit."""

import errno
import gzip
import json
import os
import statistics
import time
from collections import Counter

import pytest
import tiny
from recording import RecordingComm
from test_nodes import nodes_of, transport
from timelines import check_events, lasting
from transports import ON_SEVERAL

from zero_mpi import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, GradAccum, ShardedAdamW, tracing
from zero_mpi.device import HostStopwatch
from zero_mpi.telemetry import spans
from zero_mpi.train.timeline import Timeline

CONFIG = tiny.MODELS["llama"]
STEPS, MICRO_BATCHES = 2, 5


class Run:
    def __init__(self, comm, strategy=FULL_SHARD):
        self.module = tiny.make(comm, CONFIG, strategy, bucket_mb=0.03)
        self.optimizer = ShardedAdamW(self.module, lr=1e-2)
        self.accumulator = GradAccum(self.module, MICRO_BATCHES)

    def step(self, number):
        tiny.run_step(self.module, self.accumulator, CONFIG, number, MICRO_BATCHES)
        return self.accumulator.total_loss(), self.optimizer.step(max_norm=1.0).grad_norm


def load(comm, path):
    content = None
    if comm.rank == 0:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return comm.broadcast_object(content)


def traced(comm, path, strategy=FULL_SHARD):
    """Train with a timeline; return its events, the meter's counts, and losses and norms."""
    run = Run(comm, strategy)
    run.step(STEPS)  # the timeline must not count earlier transfers
    if isinstance(comm, RecordingComm):
        comm.log.clear()
    with tracing(comm, path) as timeline:
        before, sent = comm.meter.wait_seconds, comm.meter.sent_bytes
        records = []
        for number in range(STEPS):
            timeline.step(number + 1)
            records.append(run.step(number))
        costs = comm.meter.wait_seconds - before, comm.meter.sent_bytes - sent
    return load(comm, path)["traceEvents"], costs, records


def moved_by(events, rank):
    moved = ("gathers", "reductions", "other transfers")
    return [event for event in lasting(events) if event["pid"] == rank + 1 and event["cat"] in moved]


def check_costs(events, rank, costs, near=0.01):
    """Compare waits (to `near` microseconds) and bytes of the timeline with the meter's."""
    waits = [
        event["dur"] for event in lasting(events) if event["pid"] == rank + 1 and event["cat"] == "waits"
    ]
    assert sum(waits) == pytest.approx(1e6 * costs[0], abs=0.01 * len(waits) + near)
    assert sum(event["args"]["bytes"] for event in moved_by(events, rank)) == costs[1]


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda s: s.name)
def test_every_transfer_with_its_bytes_and_every_wait(exact, tmp_path, strategy):
    comm = RecordingComm(exact)
    events, costs, _ = traced(comm, tmp_path / "trace.json.gz", strategy)
    check_events(events)
    check_costs(events, exact.rank, costs)
    transfers = moved_by(events, exact.rank)
    # Events after the last step, such as the exchange of these events, are not in the timeline.
    requests = [entry for entry in comm.log if entry.kind in ("allgather", "reduce_scatter", "allreduce")]
    names = Counter((event["name"], event["args"]["bytes"]) for event in transfers)
    assert names == Counter((f"{entry.kind} {entry.label}", entry.sent) for entry in requests)
    assert len(transfers) > STEPS * 4
    unfinished = {event["args"]["what"] for event in transfers if "unfinished" in event["args"]}
    assert unfinished <= ({"parameters"} if strategy is SHARD_GRAD_OP else set()), "the next forward's gather"


@pytest.mark.world(4)
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize("kind", ON_SEVERAL)
def test_on_several_nodes(mpi, kind, strategy, tmp_path):
    """Messages between nodes belong to one transfer, which has all their bytes."""
    with transport(kind, 2) as comm:
        events, costs, records = traced(comm, tmp_path / "trace.json", strategy)
    assert records == traced(mpi, tmp_path / "plain.json", FULL_SHARD)[2]
    check_events(events)
    wrong = load(mpi, tmp_path / "trace.json")["otherData"]["clock_error_us"]
    check_costs(events, mpi.rank, costs, near=2 * wrong)  # clocks seem to drift
    reductions = Counter(e["name"] for e in moved_by(events, mpi.rank) if "gradients" in e["name"])
    rounds = STEPS * -(-MICRO_BATCHES // mpi.size)
    assert set(reductions.values()) == {rounds}
    assert len(reductions) == 4


def test_every_stage_of_every_micro_batch_is_there(mpi, tmp_path):
    events, _, _ = traced(mpi, tmp_path / "trace.json")
    ours = [event for event in lasting(events) if event["pid"] == mpi.rank + 1]
    counts = Counter(event["name"] for event in ours if event["cat"] == "compute")
    runs = STEPS * len(range(mpi.rank, MICRO_BATCHES, mpi.size))
    names = ["token_embd", "blk.0", "blk.1", "output"]
    expected = {f"{way} {name}": runs for way in ("forward", "backward") for name in names} | {"loss": runs}
    assert counts == {name: count for name, count in expected.items() if count}
    assert [e["name"] for e in ours if e["cat"] == "optimizer"] == ["norm", "update"] * STEPS
    assert [e["args"]["step"] for e in ours if e["args"]["kind"] == "step"] == [1, 2]
    in_steps = {e["args"].get("micro_batch") for e in ours if e["cat"] == "compute"}
    assert in_steps == set(range(mpi.rank, MICRO_BATCHES, mpi.size))


def test_recording_changes_no_bit_and_no_order(exact, tmp_path):
    plain, watched = RecordingComm(exact), RecordingComm(exact)
    run = Run(plain)
    run.step(STEPS)
    plain.log.clear()
    expected = [run.step(number) for number in range(STEPS)]
    _, _, records = traced(watched, tmp_path / "trace.json")
    assert records == expected
    calls = [entry[:2] for entry in watched.log if entry.label != "clock"]  # requested before the first step
    assert calls[: len(plain.log)] == [entry[:2] for entry in plain.log]


# ---------------------------------------------------------------------------------------------- clocks


def barriers(comm, path, count=5):
    with tracing(comm, path):
        for _ in range(count):
            comm.barrier()
            time.sleep(0.02)  # clocks drift meanwhile
    return load(comm, path)


def apart(trace, ranks):
    """Return the median time, in microseconds, by which ranks seem to leave a barrier before others enter.

    The maximum would count ranks that lose their core at the beginning of the wait.
    """
    waits = [
        [e for e in lasting(trace["traceEvents"]) if e["pid"] == rank + 1 and e["name"] == "barrier"]
        for rank in range(ranks)
    ]
    assert {len(events) for events in waits} == {5}
    return statistics.median(
        max(event["ts"] for event in group) - min(event["ts"] + event["dur"] for event in group)
        for group in zip(*waits, strict=True)
    )


def test_ranks_of_a_host_are_on_one_clock(mpi, tmp_path):
    trace = barriers(mpi, tmp_path / "trace.json")
    assert trace["otherData"]["clock_error_us"] == 0
    assert apart(trace, mpi.size) < 1000, "a millisecond"


def test_clocks_of_other_hosts_are_brought_to_rank_0s(mpi, monkeypatch, tmp_path):
    """Each rank counts as a host. The clocks are seconds apart and run at different speeds."""
    real, begun = time.perf_counter, time.perf_counter()

    def shifted():
        return real() + 7.5 * mpi.rank + 0.5 * mpi.rank * (real() - begun)

    with nodes_of(1), monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", shifted)
        patched.setattr(HostStopwatch, "stamp", staticmethod(shifted))
        trace = barriers(mpi, tmp_path / "trace.json")
    wrong = trace["otherData"]["clock_error_us"]
    assert (wrong > 0) == (mpi.size > 1)
    assert wrong < 1e5, "messages on one machine take less"
    assert apart(trace, mpi.size) <= 2 * wrong + 1000
    check_events(trace["traceEvents"])


# ---------------------------------------------------------------------------------------------- limits


def test_memory_is_bounded(exact, monkeypatch, tmp_path):
    """Too many spans end the timeline, which keeps the spans until then."""
    run, path = Run(exact), tmp_path / "trace.json"
    with tracing(exact, path) as timeline:
        timeline.step(1)
        run.step(0)
        recorder = timeline.recorder
        monkeypatch.setattr(spans, "MAX_SPANS", len(recorder.spans) + len(recorder.transfers) + 3)
        for number in (2, 3, 4):
            timeline.step(number)
            run.step(number - 1)
    assert timeline.ends_in == 2
    trace = load(exact, path)
    assert trace["otherData"]["ends_in"] == 2
    steps = {event["args"]["step"] for event in lasting(trace["traceEvents"])}
    assert steps == {1, 2}
    check_events(trace["traceEvents"])


def test_a_disk_that_fills_while_the_parts_come_is_told_to_all_ranks(exact, monkeypatch, tmp_path):
    def write_two(path, parts):
        assert [len(next(parts)) > 0 for _ in range(2)] == [True, True]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zero_mpi.train.timeline.CHUNK", 64)
    monkeypatch.setattr("zero_mpi.train.timeline.write_parts", write_two)
    timeline = Timeline(exact, tmp_path / "trace.json")
    assert timeline.write().endswith("trace.json cannot be written: No space left on device")
    exact.barrier()
