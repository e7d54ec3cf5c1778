"""Training of adapters by the command gives the same files at any number of ranks."""

import json

import numpy as np
import pytest
from gguf_files import write_tensors
from jobs import COMPILED, run_job
from test_command_bits import fields, needs_mpiexec, train
from test_resume import refused

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.weights import adapter_metadata, lora_of, open_merged
from zero_mpi.commands.export.command import command
from zero_mpi.launch.world import World
from zero_mpi.models.lora import FROZEN
from zero_mpi.sharding.layout import check_patterns, is_trainable

pytestmark = needs_mpiexec
SIZES = ["--arch", "llama", "--dim", "48", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
SIZES += ["--context", "16"]
DATA = ["--context", "16", "--batch-size", "6", "--micro-batch", "2", "--sample", "0", "--warmup", "2"]
NAMES = ("adapter.gguf", "optimizer.gguf")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number} of {number * number}\n" for number in range(400)))
    return ["--data", str(path)]


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "run"
    train(1, out, *SIZES, *DATA, *text, "--steps", "3")
    return out / "latest" / "model.gguf"


@pytest.fixture(scope="module")
def alone(base, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    flags = [*DATA, *text, "--init", str(base), "--lora", "3", "--lr-scale", "*.lora_b=16", "--steps", "4"]
    train(1, out, *flags)
    return out, flags


def files(out):
    folder = out / "latest"
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    return [(folder / name).read_bytes() for name in NAMES]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ["--strategy", "no-shard"]),
        (3, ["--transport", "mpi", "--recompute", "--checkpoint-io", "parallel"]),
        (5, ["--strategy", "shard-grad-op", "--async-save"]),
    ],
)
def test_the_same_files_on_several_ranks(ranks, more, alone, tmp_path):
    out, flags = alone
    train(ranks, tmp_path / "run", *flags, *more)
    assert files(tmp_path / "run") == files(out)
    assert fields(tmp_path / "run") == fields(out)


def test_the_loss_before_the_first_step_is_the_bases(alone, base):
    """The loss before training is the base model's, because new adapters add zero."""
    of_base, of_run = (
        [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (base.parents[1], alone[0])
    )
    assert [record.get("val_loss_before") for record in of_run] == [of_base[-1]["val_loss"], None, None, None]
    assert not any("val_loss_before" in record for record in of_base), "it has no base model"
    assert of_run[-1]["val_loss"] < of_run[0]["val_loss_before"]


def test_export_writes_the_merged_model_and_generate_takes_both(alone, base, tmp_path):
    out, _ = alone
    adapter, merged = out / "latest", tmp_path / "merged.gguf"
    export = ["-m", "zero_mpi", "export", str(base), str(merged), "--merge", str(adapter)]
    assert run_job(1, export)[0] == 0
    expected, actual = open_merged(base, adapter), GGUFFile.open(merged)
    assert all(np.array_equal(actual.tensor(name), expected.tensor(name)) for name in expected.tensors)
    ask = ["--prompt", "line", "--tokens", "20", "--temperature", "0"]
    both = run_job(1, ["-m", "zero_mpi", "generate", str(base), "--lora", str(adapter), *ask], env=COMPILED)
    one = run_job(1, ["-m", "zero_mpi", "generate", str(merged), *ask], env=COMPILED)
    assert both == one
    assert both[0] == 0


@pytest.mark.parametrize("kind", ["gguf", "peft"])
def test_a_run_goes_on_from_an_adapter_with_new_moments(kind, alone, base, text, tmp_path):
    out, flags = alone
    start = out / "latest" / "adapter.gguf"
    if kind == "peft":
        assert command(World(0, 1), [str(start), str(tmp_path / "peft"), "--base", str(base)]) == 0
        start = tmp_path / "peft"
    train(2, tmp_path / "run", *flags[:-1], "0", "--lora-alpha", "6", "--lora-init", str(start))
    before, after = (GGUFFile.open(run / "latest" / "adapter.gguf") for run in (out, tmp_path / "run"))
    assert all(np.array_equal(before.tensor(name), after.tensor(name)) for name in before.tensors)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lora", "2"], "--init BASE.gguf"),
        (["--lora", "0", "--init", "BASE"], "--lora 0: expected at least 1"),
        (["--init", "BASE", "--lora-alpha", "3"], "--lora-alpha 3.0: "),
        (["--init", "BASE", "--lora", "2", "--lora-targets", "*.bias"], "--lora-targets *.bias: "),
        (["--init", "BASE", "--lora", "2", "--lora-init", "BASE"], "expected an adapter"),
        (["--init", "BASE", "--lora", "2", "--lr-scale", "blk*t=2"], "--lr-scale: 'blk*t' "),
        (["--init", "BASE", "--lr-scale", "*b=2", "--dry-run"], "--lr-scale: '*b' "),
    ],
)
def test_what_cannot_be_meant_is_refused(more, said, base, text, tmp_path):
    more = [str(base) if flag == "BASE" else flag for flag in more]
    assert said in refused(1, tmp_path / "run", *DATA, *text, *more)


def test_another_base_is_refused_at_a_resume(alone, base, text, tmp_path):
    _, flags = alone
    train(1, tmp_path / "run", *flags[:-1], "2")
    train(1, tmp_path / "other", *SIZES, *DATA, *text, "--steps", "1", "--seed", "7")
    other = tmp_path / "other" / "latest" / "model.gguf"
    changed = [str(other) if flag == str(base) else flag for flag in flags]
    assert "is a checkpoint of another run: --base was" in refused(1, tmp_path / "run", *changed)


@pytest.mark.parametrize("targets", [["blk.1.ffn_down.weight"], ["blk.0.attn_q.weight", "blk.1.*"]])
def test_blocks_need_not_have_the_same_adapters(targets, base, text, tmp_path):
    """Patterns may name only some blocks, like PEFT's layers_to_transform."""
    flags = ["--init", str(base), "--lora", "2", "--context", "16", "--lora-targets", *targets]
    train(2, tmp_path / "run", *DATA, *text, *flags, "--steps", "1")
    saved = GGUFFile.open(tmp_path / "run" / "latest" / "adapter.gguf").tensors
    names = {name for name in saved if name.endswith(".lora_a")}
    assert len(names) == (1 if len(targets) == 1 else 8)
    assert {name.split(".")[1] for name in names} == ({"1"} if len(targets) == 1 else {"0", "1"})
    count = sum(spec.size for file in (saved, GGUFFile.open(base).tensors) for spec in file.values())
    status, printed, errors = run_job(1, ["-m", "zero_mpi", "plan", *flags])
    assert (status, errors) == (0, "")
    assert f" {count:,} parameters" in printed


def test_evaluate_takes_an_adapter_with_its_base(alone, base, text, tmp_path):
    out, _ = alone
    adapter, merged = str(out / "latest"), str(tmp_path / "merged.gguf")
    assert run_job(1, ["-m", "zero_mpi", "export", str(base), merged, "--merge", adapter])[0] == 0

    def losses(name, ranks, *models):
        command = ["-m", "zero_mpi", "evaluate", *models, *text, "--json", str(tmp_path / name)]
        status, _, errors = run_job(ranks, command)
        assert (status, errors) == (0, "")
        report = json.loads((tmp_path / name).read_text())
        return [model["text"]["loss"] for model in report["models"]]

    both = losses("both", 2, str(base), "--lora", adapter, "--against", str(base))
    assert both == losses("each", 1, merged, "--against", str(base))
    assert both[0] < both[1], "the adapter must reduce the loss"


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_an_adapter_that_is_not_finite_is_the_one_that_is_named(value, alone, base, text, tmp_path):
    """The message names the adapter's file. A value of 3e38 is finite, but overflows in a product."""
    source, path = GGUFFile.open(alone[0] / "latest" / "adapter.gguf"), tmp_path / "adapter.gguf"
    factors = {name: source.tensor(name) for name in source.tensors}
    for factor in list(factors.values())[:2]:
        factor.ravel()[0] = value
    write_tensors(path, "llama", adapter_metadata(lora_of(source)), factors)
    model = ["-m", "zero_mpi", "evaluate", str(base)]
    for arguments in (
        [*model, "--lora", str(path), *text],
        ["-m", "zero_mpi", "generate", str(base), "--lora", str(path), "--tokens", "1"],
        ["-m", "zero_mpi", "export", str(base), str(tmp_path / "merged.gguf"), "--merge", str(path)],
    ):
        status, _, errors = run_job(1, arguments)
        assert (status, len(errors.splitlines())) == (2, 1), errors
        assert str(path) in errors
        assert str(base) not in errors


def test_adapters_are_chosen_by_their_suffix_and_older_patterns_go_on():
    names = ["blk.0.ssm_a", "blk.0.ssm_b", "a", "blk.0.attn_q.weight", "xlora_a"]
    adapters = ["blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"]
    assert [name for name in names + adapters if is_trainable(name, FROZEN)] == adapters
    assert [name for name in adapters if is_trainable(name, ("*[!ab]",))] == adapters
    check_patterns("frozen", FROZEN, dict.fromkeys(names + adapters))
    with pytest.raises(ValueError, match=r"weight"):
        check_patterns("frozen", FROZEN, dict.fromkeys(adapters))
