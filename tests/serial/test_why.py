"""`zero_mpi.inspect --why A B`: settings, records, checkpoints and computing again, down to a tensor.

Six steps on three ranks over messages are what all other runs, each otherwise in one thing, are held against.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import run_job
from test_command_bits import needs_mpiexec, train, write_text
from test_verify import OFTEN, SMALL, change, content, forge_model

from zero_mpi.errors import UsageError
from zero_mpi.inspect.command import command, why_lines
from zero_mpi.inspect.why import verdict
from zero_mpi.launch.world import World
from zero_mpi.verify.stage_digests import FEW, Seen

FLAGS = [*SMALL, *OFTEN, "--grad-clip", "0"]
# A bit of the gradients of rank 1 flips in step 4: the 7th time that it shows those of a unit to an audit.
FLIPPED = """
import numpy as np
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.sharding.witness import Witness
from zero_mpi.train import command

see, calls = Witness.see, 0

def spoiled(self, unit):
    global calls
    calls += MPI.COMM_WORLD.rank == 1
    if calls == 7:
        unit.gradient.of_round.view(np.uint32)[3] ^= np.uint32(1 << 20)
    see(self, unit)

Witness.see = spoiled
command.main()
"""
pytestmark = needs_mpiexec


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Data of several documents."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on three ranks, with the checkpoints of steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(3, out, *FLAGS, "--strategy", "no-shard", "--transport", "mpi", "--data", *text)
    return out


def why(first: Path, second: Path, *more: str) -> tuple[dict[str, Any], list[str]]:
    """What is said of two runs, as the object that is printed and as the text that is made of it."""
    status, printed = inspect(first, second, "--json", *more)
    said = json.loads(printed)
    assert status == (0 if said["same"] else 1)
    return said, list(why_lines(said))


def inspect(first: Path, second: Path, *flags: str) -> tuple[int, str]:
    """Exit status and output."""
    job = ["-m", "zero_mpi.inspect", "--why", str(first), str(second), *flags]
    status, printed, errors = run_job(1, job, timeout=50)
    assert "error" not in errors, errors
    return status, printed


def names(said: dict[str, Any]) -> list[str]:
    """Of settings and facts, what differs."""
    return [one["name"] for one in said["settings"] if one["moves_bits"]]


# ------------------------------------------------------------------------------------------------- the same


def test_a_run_on_other_ranks_is_the_same(whole, text, tmp_path):
    train(2, tmp_path / "out", *FLAGS, "--transport", "shared", "--data", *text)
    before = content(whole)
    said, lines = why(whole, tmp_path / "out")
    assert said["same"]
    assert said["settings"] == []
    assert lines[2:] == [
        "moves bits  nothing that is known to move bits differs; ranks, strategy and transport move none",
        "records     all 6 common records are the same",
        "checkpoint  3 checkpoints that both have: the same tensors",
        "verdict     the same, bit for bit, in all that both have",
    ]
    assert inspect(whole, tmp_path / "out") == (0, "".join(f"{line}\n" for line in lines))
    assert content(whole) == before


# ---------------------------------------------------------------------------------- another setting or file

# what is otherwise -> flags; what is named, the first record that differs, where computing again first does
OTHERS: dict[str, tuple[list[str], str, tuple[int, str], str]] = {
    "seed": (["--seed", "5"], "seed", (1, "loss"), "the first weights: token_embd.weight"),
    "rate": (["--lr", "0.01"], "lr", (1, "lr"), "step 1: lr"),
    "precision": (
        ["--precision", "bf16"],
        "precision",
        (1, "loss"),
        "step 1, micro-batch 0: what forward gives in stage 0 (token_embd)",
    ),
    "beta": (["--beta2", "0.9"], "beta2", (2, "loss"), "step 1, after the update: token_embd.weight"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_setting_is_named_and_where_it_comes_in(kind, whole, text, tmp_path):
    flags, name, (step, field), first = OTHERS[kind]
    train(1, tmp_path / "out", *FLAGS, *flags, "--data", *text)
    said, lines = why(whole, tmp_path / "out")
    assert names(said) == [name]
    assert (said["records"]["step"], said["records"]["field"]) == (step, field)
    assert said["records"]["values"] == [record(run, step)[field] for run in (whole, tmp_path / "out")]
    assert said["computed"]["differs"][0] == first
    assert said["computed"]["runs"] == {"first": "", "second": ""}, "each comes out by its own settings"
    assert said["checkpoint"]["step"] == 2
    assert lines[-1] == f"verdict     not the same; the first that differs: {first}"
    if kind == "rate":
        assert said["computed"]["differs"][1] == "step 1, after the update: token_embd.weight"


def record(run: Path, step: int) -> dict[str, Any]:
    """The record of a step."""
    return dict(json.loads((run / "metrics.jsonl").read_text().splitlines()[step - 1]))


def test_other_data_are_named_and_the_micro_batch_that_has_others(whole, tmp_path):
    train(1, tmp_path / "out", *FLAGS, "--data", *write_text(tmp_path, seed=1))
    said, _ = why(whole, tmp_path / "out")
    assert names(said) == ["corpus"]
    assert said["computed"]["differs"][0] == "step 1, micro-batch 0: the tokens"


def test_other_first_weights_are_named(whole, text, tmp_path):
    """The models of two checkpoints, as what two runs begin from."""
    begin = ["--steps", "1", "--sample", "0", "--device", "cpu", "--batch-size", "4", "--context", "16"]
    for step in (2, 4):
        init = str(whole / f"step-{step:08d}" / "model.gguf")
        train(1, tmp_path / str(step), *begin, "--init", init, "--data", *text)
    said, _ = why(tmp_path / "2", tmp_path / "4")
    assert names(said) == ["init"]
    assert said["computed"]["differs"][0] == "the first weights: token_embd.weight"


# ------------------------------------------------------------------------------------ the same settings


@pytest.fixture(scope="module")
def wrong(text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with one bit of one rank's gradients flipped in step 4."""
    folder = tmp_path_factory.mktemp("wrong")
    script = folder / "flipped.py"
    script.write_text(FLIPPED)
    audit = ["--audit", "2", "--audit-action", "warn"]
    train(3, folder / "out", *FLAGS, *audit, "--data", *text, script=script)
    return folder / "out"


def test_a_step_that_was_computed_wrongly_is_named_with_its_tensor(whole, wrong):
    said, lines = why(whole, wrong)
    assert names(said) == []
    assert (said["records"]["step"], said["records"]["field"]) == (4, "grad_norm")
    first = said["checkpoint"]["difference"]
    assert (said["checkpoint"]["step"], first["name"], first["element"]) == (4, "output_norm.weight", [3])
    assert len(said["checkpoint"]["differing"]) == 3, "a parameter and its two moments"
    assert said["computed"]["from"] == 2
    assert said["computed"]["differs"] == []
    assert said["computed"]["runs"]["first"] == ""
    assert said["computed"]["runs"]["second"].startswith("step 4: grad_norm is ")
    assert "computed again it is as in the first: the second was made by another machine" in lines[-1]
    assert why(wrong, whole)[1][-1].split(";")[1].startswith(" computed again it is as in the second")


def test_a_record_that_was_changed_is_held_to_the_chain_and_to_computing(whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    change(run / "metrics.jsonl", 3, loss=4.25)
    said, _ = why(whole, run)
    assert said["notes"][0].startswith("second: proof.jsonl, line 6: step 4: metrics.jsonl has loss 4.25")
    assert (said["records"]["step"], said["records"]["values"][1]) == (4, 4.25)
    assert said["checkpoint"]["step"] is None
    assert said["computed"]["runs"]["first"] == ""
    assert said["computed"]["runs"]["second"].startswith("step 4: loss is 4.25 in the records, and ")


def test_a_checkpoint_that_was_changed_is_held_to_computing(whole, tmp_path):
    """Signed anew, so the folder is whole; the records up to it and after it are those of the run."""
    run = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    forge_model(run, 2)
    said, lines = why(whole, run)
    assert said["notes"] == []
    assert said["records"]["step"] is None
    assert (said["checkpoint"]["step"], said["checkpoint"]["differing"]) == (2, ["blk.0.ffn_up.weight"])
    assert said["computed"]["runs"]["first"] == ""
    assert said["computed"]["runs"]["second"].startswith("step 2: element 7 of blk.0.ffn_up.weight is ")
    assert "computed again it is as in the first" in lines[-1]


def test_without_the_data_it_says_so(whole, wrong, text, tmp_path):
    """Everything that can be told from the files is told all the same."""
    for number, run in enumerate((whole, wrong)):
        shutil.copytree(run, tmp_path / str(number), symlinks=True)
        config = tmp_path / str(number) / "config.toml"
        config.write_text(config.read_text().replace(str(Path(text[0]).parent), "/not/here"))
    said, _ = why(tmp_path / "0", tmp_path / "1")
    assert "/not/here" in said["computed"]["problem"]
    assert said["records"]["step"] == 4
    assert said["verdict"] == "not the same; no step could be computed again"
    said, _ = why(tmp_path / "0", tmp_path / "1", "--data", *text)
    assert said["computed"]["runs"]["first"] == ""


# ---------------------------------------------------------------------------------------------------- parts


def test_a_computation_is_held_to_another_in_its_order():
    file, values = io.BytesIO(), np.arange(6, dtype=np.float32)
    seen = Seen(file, holds=False)
    for number in range(FEW + 3):
        seen.see(f"array {number}", values + number)
    again = Seen(file, holds=True)
    for number in range(FEW + 3):
        again.see(f"array {number}", (values + number).reshape(2, 3))
    assert again.found == []
    other = Seen(file, holds=True)
    for number in range(FEW + 4):
        values[1] += number == 1
        other.see("another name" if number == 0 else f"array {number}", values + number)
    assert other.found == ["another name", "array 1", "array 2"]


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (("", "step 4"), "as in the first: the second was made"),
        (("step 4", ""), "as in the second: the first was made"),
        (("step 4", "step 4"), "this machine computes as neither did"),
        (("", ""), "both come out"),
    ],
)
def test_which_of_both_comes_out_is_told(texts, wanted):
    computed = {"differs": [], "runs": dict(zip(("first", "second"), texts, strict=True))}
    assert wanted in verdict({"same": False, "computed": computed})


@pytest.mark.parametrize("arguments", [["--why", "A"], ["--why", "A", "B", "--keys"], ["--why", "A", "B"]])
def test_bad_usage(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"--why: expected two run folders|'?A'?: expected a run folder"):
        command(World(0, 1), arguments)
    with pytest.raises(UsageError, match="only --why reads data"):
        command(World(0, 1), ["A", "B", "--data", "text"])
