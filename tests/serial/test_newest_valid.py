"""`--resume auto` continues from the newest sound checkpoint and names skipped checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_command_bits import assert_same_run, needs_mpiexec, train, write_text
from test_resume import refused as refused_line

from zero_mpi.checkpoint.gguf.reader import GGUFFile

MODEL, STATE = "model.gguf", "optimizer.gguf"
NEWEST, OLDER = "step-00000003", "step-00000002"
TENSORS = {MODEL: "blk.0.ffn_up.weight", STATE: "optimizer.adam.second_moments.blk.0.ffn_up.weight"}
BASE = ["--heads", "3", "--kv-heads", "1", "--ffn", "17", "--context", "16", "--warmup", "2"]
BASE += ["--batch-size", "7", "--micro-batch", "2", "--sample", "0", "--schedule", "constant"]
BASE += ["--save-every", "1", "--keep", "0"]
SMALL = [*BASE, "--layers", "1", "--dim", "24"]
pytestmark = needs_mpiexec


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return ["--data", *write_text(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    train(1, out, *SMALL, *data, "--steps", "5")
    return out


@pytest.fixture(scope="module")
def three(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("three") / "out"
    train(2, out, *SMALL, *data, "--steps", "3")
    return out


@pytest.fixture
def run(three, tmp_path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "out", symlinks=True))


def everything(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def refused(ranks: int, out: Path, *flags: str) -> str:
    before = everything(out)
    line = refused_line(ranks, out, *flags)
    assert everything(out) == before
    return line


# functions that damage a checkpoint's folder and return the text that the run must print


def cut(folder: Path) -> str:
    path = folder / MODEL
    path.write_bytes(path.read_bytes()[:-1000])
    return MODEL


def flip(folder: Path, name: str, at: int) -> str:
    content = bytearray((folder / name).read_bytes())
    content[at] ^= 1
    (folder / name).write_bytes(content)
    return name


def flip_moment(folder: Path) -> str:
    info = GGUFFile.open(folder / STATE).tensors[TENSORS[STATE]]
    flip(folder, STATE, info.offset + info.nbytes // 8 * 4)
    return TENSORS[STATE]


def flip_index(folder: Path) -> str:
    content = (folder / MODEL).read_bytes()
    return flip(folder, MODEL, content.index(b"general.architecture") + len("general.architecture") + 1)


def lose(*names: str) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        for name in names:
            (folder / name).unlink()
        return names[0]

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "model cut": cut,
    "a bit of a moment": flip_moment,
    "index": flip_index,
    "older model": lambda folder: shutil.copy(folder.parent / OLDER / MODEL, folder) and MODEL,
    "older moments": lambda folder: shutil.copy(folder.parent / OLDER / STATE, folder) and STATE,
    "no model": lose(MODEL),
    "no moments": lose(STATE),
    "empty folder": lose(MODEL, STATE),
    "folder gone": lambda folder: shutil.rmtree(folder) or NEWEST,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_and_the_run_is_the_same(damage, run, data, unbroken):
    expected = DAMAGES[damage](run / NEWEST)
    printed = train(1, run, *SMALL, *data, "--steps", "5")
    (line,) = [text for text in printed.splitlines() if "unusable checkpoint" in text]
    assert expected in line
    assert NEWEST in line
    assert f"resuming from {run.resolve() / OLDER} at step 2" in printed
    assert_same_run(run, unbroken)
    for step in (3, 4, 5):  # the run has replaced the damaged checkpoint
        folder = f"step-{step:08d}"
        assert everything(run / folder) == everything(unbroken / folder)


def test_one_that_was_complete_before_the_link_was_replaced_is_gone_on_from(run, data, unbroken):
    """If a job died after a save, before it moved the link `latest`, the run resumes from that save."""
    (run / "latest").unlink()
    (run / "latest").symlink_to(OLDER)
    printed = train(3, run, *SMALL, *data, "--steps", "5")
    assert f"resuming from {run.resolve() / NEWEST} at step 3" in printed
    assert_same_run(run, unbroken)


@pytest.mark.parametrize("ranks", [1, 3])
def test_if_all_are_damaged_the_run_does_not_start_over(ranks, run, data):
    cut(run / NEWEST)
    flip_moment(run / OLDER)
    lose(STATE)(run / "step-00000001")
    line = refused(ranks, run, *SMALL, *data, "--steps", "5")
    assert NEWEST in line
    assert "2 older ones" in line
    assert "--resume never" in line


@pytest.mark.parametrize("damage", ["model cut", "a bit of a moment", "older moments"])
def test_a_damaged_one_that_was_asked_for_is_refused(damage, run, data):
    expected = DAMAGES[damage](run / NEWEST)
    line = refused(3, run, *SMALL, *data, "--steps", "5", "--resume", str(run / NEWEST))
    assert expected in line
    assert NEWEST in line


def test_a_checkpoint_of_another_model_is_no_damage(run, data, tmp_path):
    """A sound checkpoint of another run is an error, because skipping it would continue the wrong run."""
    train(1, tmp_path / "other", *BASE, *data, "--layers", "1", "--dim", "30", "--steps", "4")
    shutil.copytree(tmp_path / "other" / "step-00000004", run / "step-00000004")
    (run / "latest").unlink()
    (run / "latest").symlink_to("step-00000004")
    line = refused(2, run, *SMALL, *data, "--steps", "5")
    assert "step-00000004 is a checkpoint of another run" in line
    assert "embedding_length was 30, now 24" in line
