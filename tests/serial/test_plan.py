"""Tests of `zero-mpi plan` against real processes and jobs: memory, sent bytes and flags."""

import json
import re
from dataclasses import replace
from pathlib import Path

import architectures
import ml_dtypes
import numpy as np
import pytest
from jobs import run_job
from planned_losses import LOSSES, make_step, objective_of

from zero_mpi import GradAccum, SerialComm, ShardedAdamW, ShardedModule, ops
from zero_mpi.cli.text import size
from zero_mpi.commands.plan.command import command, read
from zero_mpi.device import arrays
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.models.lora import FROZEN, LoRA
from zero_mpi.nn import CrossEntropy
from zero_mpi.ops import backend
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Link, Machine, machine_of
from zero_mpi.plan.plan import MOST, largest_micro_batch, sweep
from zero_mpi.plan.rank_memory import plan_memory
from zero_mpi.plan.simulate import COMPUTE, GATHER, WAIT, StepEvent, simulate
from zero_mpi.plan.step_time import Player
from zero_mpi.sharding.strategy import strategy_named

needs_numba = pytest.mark.skipif(backend() == "numpy", reason="the plan models the compiled operations")

WIDTHS = {"vocab_size": 500, "context_length": 192, "embedding_length": 64, "feed_forward_length": 160}
WIDTHS |= {"head_count": 4, "head_count_kv": 2, "key_length": 16, "value_length": 16}
MODELS = architectures.every(WIDTHS)
MODELS |= {f"{arch} tied": replace(MODELS[arch], tied=True) for arch in ("llama", "gpt2")}
SLOW = Machine(Link(0, 0), Link(1e-3, 1e-8), flops=1e9, moves=1e9)


def recycled_bytes(case, monkeypatch):
    monkeypatch.setattr(arrays.RECYCLED, "_free", {})
    monkeypatch.setattr(arrays.RECYCLED, "_blocks", [])
    options = {"prefetch": case.prefetch, "frozen": case.frozen, "precision": case.precision}
    stages, strategy = case.model.stages(case.recompute), strategy_named(case.strategy_name)
    module = ShardedModule(stages, SerialComm(), strategy, **options)
    module.initialize(seed=0)
    optimizer, accumulator = ShardedAdamW(module), GradAccum(module, case.rounds.micro_batches)
    if case.teacher or case.preference:
        for _ in range(2):
            make_step(objective_of(case, module), accumulator, optimizer)
        return arrays.RECYCLED.nbytes
    shape = (case.micro_batch, case.context + 1)
    tokens = np.random.default_rng(0).integers(case.model.vocab_size, size=shape)
    for _ in range(2):
        for _ in range(case.rounds.micro_batches):
            accumulator.accumulate(tokens[:, :-1], CrossEntropy(tokens[:, 1:], 1.0 / case.tokens))
        accumulator.total_loss()
        optimizer.step(max_norm=1.0)
    return arrays.RECYCLED.nbytes


@needs_numba
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_layers_on_fakes_take_what_real_ones_take(name, recompute, monkeypatch):
    case = Case(MODELS[name], batch_size=6, micro_batch=3, context=192, recompute=recompute)
    assert simulate(case).recycled == recycled_bytes(case, monkeypatch)


@needs_numba
@pytest.mark.parametrize(
    "changes",
    [
        {"context": 700, "micro_batch": 1},  # attention weights are computed again in backward
        {"context": 1100, "micro_batch": 1},  # early rows have separate gradient arrays
        {"context": 129, "micro_batch": 5},
        {"strategy_name": "no-shard"},
        {"frozen": ("token_embd*", "blk.0.*")},
        {"frozen": FROZEN, "lora": LoRA(5, 7.0)},
        {"batch_size": 1, "micro_batch": 1},
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fakes_of_other_sizes_and_settings(name, changes, monkeypatch):
    changes = dict(changes)
    model = replace(MODELS[name], context_length=2048, vocab_size=4321, lora=changes.pop("lora", None))
    case = Case(model, **{"batch_size": 4, "micro_batch": 2} | changes)
    assert simulate(case).recycled == recycled_bytes(case, monkeypatch)


@needs_numba
@pytest.mark.skipif(not ops.products(ml_dtypes.bfloat16)[0], reason=ops.products(ml_dtypes.bfloat16)[1])
@pytest.mark.parametrize("changes", [{}, {"context": 700, "micro_batch": 1}, {"strategy_name": "no-shard"}])
@pytest.mark.parametrize("name", MODELS)
def test_fakes_of_bfloat16_take_what_its_kernels_take(name, changes, monkeypatch):
    model = replace(MODELS[name], context_length=1024, vocab_size=4321)
    case = Case(model, **{"batch_size": 4, "micro_batch": 2, "precision_name": "bf16"} | changes)
    wide = replace(case, precision_name="fp32")
    assert simulate(case).recycled == recycled_bytes(case, monkeypatch) < simulate(wide).recycled


@needs_numba
@pytest.mark.parametrize("name", LOSSES)
def test_fakes_of_other_losses(name, monkeypatch):
    changes = dict(LOSSES[name])
    model = replace(MODELS["llama"], vocab_size=4321, lora=changes.pop("lora", None))
    case = Case(model, batch_size=4, micro_batch=2, context=192, **changes)
    assert simulate(case).recycled == recycled_bytes(case, monkeypatch)


@needs_numba
def test_logits_come_in_chunks(monkeypatch):
    model = replace(MODELS["llama"], block_count=1, vocab_size=70_000)
    case = Case(model, batch_size=4, micro_batch=4, context=192)
    seen = simulate(case)
    assert seen.recycled == recycled_bytes(case, monkeypatch)
    assert seen.logits == 192 * 70_000 * 4 <= 64 << 20 < 4 * seen.logits
    head = replace(model, lora=LoRA(3, 6.0, ("output.weight",)))
    adapted = replace(case, model=head, frozen=FROZEN)
    assert simulate(adapted).recycled == recycled_bytes(adapted, monkeypatch) < 3 * seen.recycled


def test_a_transfer_hides_behind_what_is_computed_before_its_wait():
    case = Case(MODELS["llama"], ranks=2, nodes=2)
    player = Player(case, SLOW)
    takes = [player.case.partitions[unit].counts[0] * 4 * 1e-8 + 1e-3 for unit in (0, 1)]
    second = StepEvent(COMPUTE, flop=1e9 * takes[0] / 2)
    starts = [StepEvent(GATHER, 0), StepEvent(GATHER, 1)]
    player.play([*starts, second, StepEvent(WAIT, 0, GATHER), StepEvent(WAIT, 1, GATHER)])
    time = player.time
    assert time.communication == pytest.approx(sum(takes))
    assert time.exposed == pytest.approx(sum(takes) - takes[0] / 2)  # they share a link
    assert time.seconds == pytest.approx(time.computation + time.exposed)


TINY = ["--layers", "2", "--dim", "48", "--heads", "4", "--context", "24", "--batch-size", "5"]
TINY += ["--micro-batch", "1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text").write_text("some text to train on. " * 99)
    flags = [*TINY, "--transport", "mpi", "--strategy", "full-shard", "--recompute"]
    run = ["--data", "text", "--out", "run", "--steps", "2", "--sample", "0", "--eval-every", "1"]
    status, _, errors = run_job(3, ["-m", "zero_mpi.train", *flags, *run], cwd=folder, timeout=60)
    assert (status, errors) == (0, "")
    return folder, flags


def planned(*arguments, folder):
    assert command(World(0, 1), [*map(str, arguments), "--json", str(folder / "plan.json")]) == 0
    return json.loads((folder / "plan.json").read_text())


def test_sent_bytes_of_metrics_are_those_of_the_plan(trained, tmp_path):
    folder, flags = trained
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (plan,) = planned(*flags, "--ranks", 3, folder=tmp_path)["plans"]
    assert [record["sent_bytes"] for record in records] == [plan["traffic"]["rank_0"]] * 2
    assert plan["traffic"]["rank_0"] > 0


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    case = Case(MODELS["llama"], ranks=4, batch_size=8, micro_batch=2, context=64, transport_wanted="mpi")
    limit = 40 << 20

    def fits(rows):
        return plan_memory(replace(case, micro_batch=rows, batch_size=4 * rows)).total <= limit

    rows = largest_micro_batch(case, limit)
    assert rows > 4
    assert (fits(rows), fits(rows + 1)) == (True, False)
    assert largest_micro_batch(case, 1000) == 0
    assert largest_micro_batch(case, 1 << 60) == MOST


def test_a_sweep_doubles_the_ranks():
    case = Case(MODELS["llama"], batch_size=32, micro_batch=2, context=64)
    points = sweep(case, machine_of({}), per_node=4, most=64)
    assert [point.ranks for point in points] == [1, 2, 4, 8, 16, 32, 64]
    assert [point.nodes for point in points] == [1, 1, 1, 2, 4, 8, 16]
    assert points[0].efficiency == 1


def test_a_doctor_s_rates_are_taken(tmp_path):
    links = {
        "node": {"alpha_seconds": 1e-6, "beta_seconds_per_byte": 1e-10},
        "between": {"alpha_seconds": 5e-5, "beta_seconds_per_byte": 8e-9},
    }
    rates = {"links": links, "flops_per_second_per_rank": 7e10, "memory_bytes_per_rank": 1 << 25, "ranks": 4}
    (tmp_path / "doctor.json").write_text(json.dumps(rates))
    flags = [*TINY, "--doctor", tmp_path / "doctor.json", "--strategy", "no-shard"]
    machine = planned(*flags, folder=tmp_path)["machine"]
    assert machine["node"] == {"alpha": 1e-6, "beta": 1e-10}
    assert machine["between"] == {"alpha": 5e-5, "beta": 8e-9}
    assert (machine["flops"], machine["memory"]) == (7e10, 1 << 25)
    for rate, precision, expected in [(3e11, "bf16", 3e11), (3e11, "fp32", 7e10), (0, "bf16", 7e10)]:
        extended = rates | {"bf16_flops_per_second_per_rank": rate}
        del extended["memory_bytes_per_rank"]  # skips the slow search for a model
        (tmp_path / "doctor.json").write_text(json.dumps(extended))
        flags = [*TINY, "--doctor", tmp_path / "doctor.json", "--precision", precision]
        assert planned(*flags, folder=tmp_path)["machine"]["flops"] == expected


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--ranks 0", "--ranks 0"),
        ("--ranks 6 --nodes 4", "--nodes 4"),
        ("--memory much", "--memory much"),
        ("--memory 0", "--memory 0"),
        ("--doctor nowhere.json", "--doctor nowhere.json"),
        ("--freeze *", "--freeze *"),
        ("--transport shared --nodes 2 --ranks 2", "--transport shared"),
        ("--offload moments", "--offload moments"),
        ("--transport shared --device cuda", "--transport shared"),
        ("--precision fp16 --reduce-dtype bf16", "--reduce-dtype bf16"),
        ("--json /nowhere/plan.json", "--json /nowhere/plan.json"),
        ("--dim 4194304 --heads 1", "memory"),
        ("--base q4_0", "--lora RANK"),
        ("--base q4_0 --lora 2 --device cuda", "GPU"),
    ],
)
def test_bad_input_is_one_line(flags, named):
    with pytest.raises(UsageError) as raised:
        command(World(0, 1), flags.split())
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[1]", '{"links": 3}', '{"flops_per_second_per_rank": "fast"}'])
def test_a_file_that_is_no_doctor_s(text, tmp_path):
    (tmp_path / "doctor.json").write_text(text)
    with pytest.raises(UsageError, match=r"--doctor .*doctor\.json"):
        command(World(0, 1), ["--doctor", str(tmp_path / "doctor.json")])


PAGE = Path(__file__).resolve().parents[2] / "docs" / "finetune.md"


def test_the_table_of_the_page_is_planned():
    """Each command of the page gives one row of its table; the printed flags give the last column."""
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^zero-mpi plan (.*) --lora 16 --base q4_0$", text, re.MULTILINE)
    rows = re.findall(r"^\| [0-9]+[MB] \| [0-9]+ \| (.*iB) \|$", text, re.MULTILINE)
    assert len(rows) == len(commands) == 4
    columns = ("", "--lora 16", "--lora 16 --base q8_0", "--lora 16 --base q4_0")
    for number, (row, sizes) in enumerate(zip(rows, commands, strict=True)):
        for column in range(4) if number == 0 else (0, 3):  # large models take seconds per column
            (case,) = read([*sizes.split(), *columns[column].split()]).cases
            assert size(plan_memory(case).total) == row.split(" | ")[column]
