"""Tests of a run's summary: planned memory, FLOPs of a step, and the ranks' peak."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from test_command_bits import SIZES, needs_mpiexec, train, write_text

from zero_mpi import device
from zero_mpi.comm import SerialComm
from zero_mpi.comm import kinds as transports
from zero_mpi.commands.plan.command import read as plan_options
from zero_mpi.config.settings import Config
from zero_mpi.launch.world import World
from zero_mpi.models import GPT2, Llama
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import plan_memory
from zero_mpi.train import summary as mfu
from zero_mpi.train.summary import Start, case_of, step_flop

D, H, KV, F, V, T = 48, 6, 2, 97, 61, 80
HEAD = D // H
MODEL = Llama.from_flags(
    {"layers": 3, "dim": D, "heads": H, "kv_heads": KV, "ffn": F, "context": T, "vocab_size": V}
)
CASE = Case(MODEL, batch_size=5, micro_batch=2, context=T)


def attended(length):
    return sum(min(row // 64 * 64 + 64, length) for row in range(length))


def by_hand():
    blocks = 3 * (D * D + 2 * D * KV * HEAD + D * D + 3 * D * F)
    products = 3 * 2 * (blocks + D * V) * T
    scores_and_sums = 3 * 2 * 2 * 3 * H * HEAD * attended(T)
    return 5 * (products + scores_and_sums)


CHANGES = [{"recompute": True}, {"ranks": 4}, {"strategy_name": "no-shard"}, {"micro_batch": 1}]
CHANGES += [{"precision_name": "bf16"}, {"device": "cuda"}]


@pytest.mark.parametrize("changed", [{}, *CHANGES], ids=str)
def test_how_it_is_done_changes_no_work(changed):
    """The FLOPs of a step do not depend on recomputation, ranks, strategy, micro-batch or precision."""
    assert step_flop(dataclasses.replace(CASE, **changed)) == by_hand()


def test_attention_that_computes_its_weights_again_counts_once():
    """The FLOPs of a step count attention weights once, although they are computed twice at long contexts."""
    model = GPT2.from_flags({"layers": 1, "dim": 16, "heads": 2, "context": 2048, "vocab_size": 7})
    once, twice = (step_flop(Case(model, batch_size=1, micro_batch=1, context=t)) for t in (1024, 2048))
    pairs = 3 * 2 * 2 * 16 * (attended(2048) - 2 * attended(1024))
    assert twice - 2 * once == pairs


def test_frozen_parameters_are_less_work():
    frozen = step_flop(dataclasses.replace(CASE, frozen=("output.weight",)))
    assert step_flop(CASE) - frozen == 5 * 2 * D * V * T


class Ranks(SerialComm):
    """Transport of three ranks that all measure the same."""

    def allgather_object(self, value):
        return [value] * 3


@pytest.mark.parametrize(("reached", "edge"), [(1e11, 512), (1e12, 1024), (1e14, 4096)])
def test_the_peak_is_the_sum_over_ranks_in_matrices_that_are_large_enough(reached, edge, monkeypatch):
    edges = []

    def products(count, a, b, out):
        edges.append(len(a))
        return count * 2.0 * len(a) ** 3 / reached

    monkeypatch.setattr(mfu, "products", products)
    monkeypatch.setattr(mfu, "matrix", lambda edge, dtype: np.empty((edge, 0), dtype))
    assert mfu.measure(World(0, 3, comm=Ranks()), np.float32) == pytest.approx(3 * reached)
    assert edges[-1] == edge


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(
    "kind", [kind for kind in transports.TRANSPORTS if kind.on_gpu], ids=lambda k: k.name
)
def test_a_run_on_gpus_plans_what_the_plan_of_its_flags_does(kind, reduction, monkeypatch):
    """Only the plan for staged transfers has pinned memory."""
    config = Config(transport=kind.flag, reduction=reduction, context=T, batch_size=5)
    module = SimpleNamespace(group=SimpleNamespace(size=4))
    session = SimpleNamespace(config=config, model=MODEL, module=module, nodes=0)
    session.comm = SimpleNamespace(size=4, kind=kind)
    with monkeypatch.context() as patch:
        patch.setattr(device, "in_use", lambda: SimpleNamespace(name="cuda"))
        case = case_of(Start(session, [("n", 4)], 1e9))
    flags = ["--layers", "3", "--dim", D, "--heads", H, "--kv-heads", KV, "--ffn", F, "--vocab-size", V]
    flags += ["--context", T, "--batch-size", 5, "--ranks", 4, "--device", "cuda", "--strategy", "full-shard"]
    flags += ["--transport", kind.flag, "--reduction", reduction]
    (planned,) = plan_options(list(map(str, flags))).cases
    memory = plan_memory(case)
    assert memory == plan_memory(planned)
    assert case.exact == planned.exact == (reduction == "exact" or kind == transports.STAGED)
    assert (memory.host > 0) == (kind == transports.STAGED)


FLAGS = ["--batch-size", "5", "--micro-batch", "2", "--context", "16", "--strategy", "shard-grad-op"]
QUIET = ["--sample", "0", "--eval-every", "2", "--log-every", "4", "--warmup", "2"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Train six steps on two ranks; return the output, the `started` event and the records."""
    folder = tmp_path_factory.mktemp("job")
    data = write_text(folder)
    printed = train(2, folder / "out", *SIZES, *FLAGS, *QUIET, "--steps", "6", "--data", *data)
    first = (folder / "out" / "events.jsonl").read_text().splitlines()[0]
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return printed, json.loads(first), [json.loads(line) for line in lines]


@needs_mpiexec
def test_memory_is_planned_as_the_plan_does(job):
    _, started, _ = job
    (case,) = plan_options([*SIZES, *FLAGS, "--ranks", "2"]).cases
    assert case.transport == transports.SHARED
    assert started["planned_bytes"] == plan_memory(case).total


@needs_mpiexec
def test_the_share_of_the_peak_is_work_over_time(job):
    _, started, records = job
    for record in records:
        share = started["step_flop"] / (record["step_seconds"] * started["peak_flops"])
        assert record["mfu"] == round(share, 4)
    assert max(record["mfu"] for record in records) > 0


@needs_mpiexec
def test_memory_of_each_rank_is_recorded_at_the_steps_of_the_log(job):
    _, _, records = job
    expected = {1, 2, 4, 6}  # the first step, evaluations, every fourth step, the last step
    assert {record["step"] for record in records if "memory_bytes" in record} == expected
    for record in records:
        counts = record.get("memory_bytes", [2**25, 2**25])
        assert len(counts) == 2
        assert all(2**24 < count < 2**32 for count in counts), "expected 16 MiB to 4 GiB"
