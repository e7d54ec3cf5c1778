"""Tests of --ema: the formula of the moving average, its file, and runs with it."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny
from jobs import COMPILED, run_job
from test_command_bits import fields, needs_mpiexec, train
from test_lora import DATA, SIZES
from test_lora import text as text
from test_optim import OPTIONS, WAYS, accumulate_gradients, every_way, make_module
from test_resume import refused

from zero_mpi import SerialComm, ShardedAdamW, load, save
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import open_checkpoint
from zero_mpi.checkpoint.weights import lora_of
from zero_mpi.errors import UsageError
from zero_mpi.models.lora import FROZEN, LoRA
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import plan_memory

KEEP = 0.75
OF_THE_VALUES = ("training.checkpoint_id", "training.tensor_digests")


def averages(optimizer):
    return {
        name: array.copy()
        for unit in optimizer.units
        for name, array in unit.unit.views(optimizer.averages()[unit.name]).items()
    }


@every_way
def test_it_is_the_formula_and_a_skipped_step_leaves_it(way):
    """The average is bit-identical to the formula in NumPy's float32; skipped steps do not change it."""
    module = make_module(**way, frozen=["blk.1*"])
    optimizer = ShardedAdamW(module, **OPTIONS, ema=KEEP)
    expected = {name: array for name, array in module.state_dict().items() if module.is_trainable(name)}
    first = averages(optimizer)
    assert first.keys() == expected.keys()
    assert all(np.array_equal(first[name], expected[name]) for name in first)
    for number in range(5):
        accumulate_gradients(module, number)
        if number in (0, 2):  # check before the first update too
            module.units[0].gradient.sum[0] = np.inf
        assert optimizer.step().skipped == (number in (0, 2))
        if number not in (0, 2):
            new = module.state_dict()
            expected = {n: np.float32(KEEP) * x + np.float32(1 - KEEP) * new[n] for n, x in expected.items()}
        actual = averages(optimizer)
        assert all(actual[name].tobytes() == expected[name].tobytes() for name in expected)
    plain = ShardedAdamW(make_module(**way, frozen=["blk.1*"]), **OPTIONS, ema=KEEP)
    assert plain.memory_bytes() == 3 * sum(array.nbytes for array in optimizer.averages().values())


def stepped(steps, **options):
    module = make_module(WAYS["no-shard"]["strategy"], frozen=["blk.1*"])
    optimizer = ShardedAdamW(module, **OPTIONS, **options)
    for number in range(steps):
        accumulate_gradients(module, number)
        optimizer.step()
    return module, optimizer


def test_a_module_s_folder_gives_it_back_to_an_optimizer_that_has_one(tmp_path):
    module, optimizer = stepped(3, ema=KEEP)
    save(tmp_path / "saved", module, optimizer)
    other, fresh = stepped(0, ema=KEEP)
    assert load(tmp_path / "saved", other, fresh) == 3
    ours, theirs = averages(optimizer), averages(fresh)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    plain = stepped(0)
    with pytest.raises(UsageError, match="moving average"):
        load(tmp_path / "saved", *plain)
    save(tmp_path / "plain", *plain)
    with pytest.raises(UsageError, match="moving average"):
        load(tmp_path / "plain", other, fresh)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_plan_counts_its_bytes(adapters):
    config = tiny.MODELS["llama"]
    frozen = ()
    if adapters:
        config, frozen = replace(config, lora=LoRA(3, 6.0)), FROZEN
    plans = {}
    for ema in (None, KEEP):
        module = tiny.make(SerialComm(), config, frozen=frozen)
        case = Case(config, frozen=frozen, ema=ema, async_save=True)
        plans[ema] = memory = plan_memory(case)
        assert memory.moments == ShardedAdamW(module, ema=ema).memory_bytes()
    trained = plans[None].moments // 2
    assert plans[KEEP].moments == 3 * trained
    assert plans[KEEP].snapshot - plans[None].snapshot == (trained if adapters else plans[None].parameters)


FLAGS = [*DATA, "--tied", "--freeze", "*norm*", "--ema", "0.7", "--steps", "4"]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    train(1, out, *SIZES, *FLAGS, *text, "--save-every", "2")
    return out


def files(out, weights="model.gguf"):
    folder = out / "latest"
    names = sorted([weights, "ema.gguf", "optimizer.gguf"])
    assert sorted(path.name for path in folder.iterdir()) == names
    return [(folder / name).read_bytes() for name in names]


@needs_mpiexec
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, "--strategy no-shard --async-save"),
        (3, "--transport mpi --checkpoint-io parallel"),
        (3, "--strategy shard-grad-op"),
    ],
)
def test_the_same_files_on_several_ranks(ranks, more, alone, text, tmp_path):
    train(ranks, tmp_path / "run", *SIZES, *FLAGS, *text, *more.split())
    assert files(tmp_path / "run") == files(alone)
    assert fields(tmp_path / "run") == fields(alone)


@needs_mpiexec
def test_a_resume_goes_on_with_it(alone, text, tmp_path):
    shutil.copytree(alone / "step-00000002", tmp_path / "run" / "step-00000002")
    train(3, tmp_path / "run", *SIZES, *FLAGS, *text, "--strategy", "no-shard")
    assert files(tmp_path / "run") == files(alone)
    flags = [*FLAGS[:-4], "--ema", "0.8", "--steps", "5"]
    assert "--ema was 0.7, now 0.8" in refused(1, tmp_path / "run", *SIZES, *flags, *text)


def test_it_is_a_model_with_the_keys_of_the_other_one(alone):
    files = open_checkpoint(alone / "latest")
    assert files.average.tensors == files.model.tensors
    actual, expected = (
        {key: value for key, value in file.metadata.items() if key not in OF_THE_VALUES}
        for file in (files.average, files.model)
    )
    assert repr(actual) == repr(expected)


@pytest.mark.parametrize("what", ["bit", "gone", "other"])
def test_a_broken_one_is_passed_over(what, alone, text, tmp_path):
    shutil.copytree(alone, tmp_path / "run", symlinks=True)
    file = tmp_path / "run" / "latest" / "ema.gguf"
    if what == "bit":
        raw = bytearray(file.read_bytes())
        raw[-100] ^= 1
        file.write_bytes(raw)
    elif what == "gone":
        file.unlink()
    else:
        shutil.copy(alone / "step-00000002" / "ema.gguf", file)
    status, printed, _ = run_job(1, ["-m", "zero_mpi", "inspect", str(tmp_path / "run"), "--json"])
    assert status == (2 if what == "gone" else 1), printed
    train(1, tmp_path / "run", *SIZES, *FLAGS, *text)
    assert files(tmp_path / "run") == files(alone)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any(event.get("step") == 4 and event["event"] == "saved" for event in events[-3:])


@needs_mpiexec
def test_of_adapters_it_is_an_adapter(alone, text, tmp_path):
    base = alone / "latest" / "model.gguf"
    flags = ["--init", str(base), "--lora", "2", "--lora-targets", "*attn_q.weight", *DATA, *text]
    train(1, tmp_path / "one", *flags, "--ema", "0.7", "--steps", "3")
    train(3, tmp_path / "run", *flags, "--ema", "0.7", "--steps", "3")
    assert files(tmp_path / "run", "adapter.gguf") == files(tmp_path / "one", "adapter.gguf")
    average = GGUFFile.open(tmp_path / "run" / "latest" / "ema.gguf")
    assert lora_of(average).rank == 2
    ask = ["--lora", str(average.path), "--prompt", "line", "--tokens", "3"]
    assert run_job(1, ["-m", "zero_mpi", "generate", str(base), *ask], env=COMPILED)[0] == 0
