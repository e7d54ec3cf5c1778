"""--patience ends a run at the same step with the same bytes at any number of ranks and after a resume."""

import json
import os
import shutil

import pytest
from jobs import run_job, status_of
from patched import train_with
from test_command_bits import assert_same_run, fields, needs_mpiexec, train, write_text
from test_resume import refused

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.state import Best, read_progress

SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
SMALL += ["--batch-size", "5", "--micro-batch", "2", "--warmup", "2", "--lr", "0.3"]
SMALL += ["--schedule", "constant", "--eval-every", "2", "--eval-windows", "5", "--val-fraction", "0.3"]
SMALL += ["--save-every", "0", "--keep", "1"]
WHY = "after 3 evaluations without"


def losses(out):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["val_loss"] for record in records if "val_loss" in record}


def expected_end(curve, patience):
    """Return (last step, best step) by the definition, from the losses of a run without patience."""
    best, count = None, 0
    for step, loss in curve.items():
        best, count = (step, 0) if best is None or loss < curve[best] else (best, count + 1)
        if count == patience:
            break
    return step, best


def best_of(folder):
    return read_progress(GGUFFile.open(folder / "optimizer.gguf")).best


def checkpoints(out):
    return sorted(path.name for path in out.glob("step-*"))


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return [*SMALL, "--data", *write_text(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def endless(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("endless") / "out"
    train(1, out, *flags, "--steps", "40")
    return losses(out)


@pytest.fixture(scope="module")
def stopped(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "out"
    return out, train(1, out, *flags, "--steps", "40", "--patience", "3")


@needs_mpiexec
def test_it_ends_where_the_definition_says_and_keeps_the_best(stopped, endless):
    out, output = stopped
    last, best = expected_end(endless, 3)
    assert best > 2, "the best must not be the first"
    assert last < 40
    assert losses(out) == {step: loss for step, loss in endless.items() if step <= last}
    assert checkpoints(out) == [f"step-{best:08d}", f"step-{last:08d}"]  # the best and the newest
    assert [os.readlink(out / name) for name in ("latest", "best")] == checkpoints(out)[::-1]
    assert best_of(out / "best") == Best(endless[best], best, 0)
    assert best_of(out / "latest") == Best(endless[best], best, 3)
    (line,) = [line for line in output.splitlines() if "stopped early" in line]
    for part in (f"after step {last}, {WHY}", f"{endless[best]:.4f} nats", f"of step {best}: {out}/best"):
        assert part in line
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (early,) = [event for event in events if event["event"] == "early-stop"]
    assert (early["step"], early["best_step"], early["val_loss"]) == (last, best, endless[best])
    assert early["evaluations"] == 3
    status = status_of(out)
    assert (status["state"], status["step"], status["steps"]) == ("done", last, 40)
    assert status["reason"] == events[-1]["reason"]
    assert WHY in status["reason"]


STOPS = "from zero_mpi.launch.stopping import signals; signals.name = 'SIGTERM' if done + 1 in {} else ''"


@needs_mpiexec
def test_a_run_that_is_stopped_again_and_again_ends_the_same(stopped, endless, flags, tmp_path):
    """The run is stopped after the best evaluation, between evaluations, and before the last evaluation."""
    last, best = expected_end(endless, 3)
    stops = [best, best + 1, last - 1]
    script = train_with(tmp_path / "stops.py", STOPS.format(stops))
    command = [script, "--out", str(tmp_path / "out"), *flags, "--steps", "40", "--patience", "3"]
    for number, ranks in enumerate((3, 1, 2)):
        status, printed, errors = run_job(ranks, command, timeout=50)
        assert (status, errors) == (75, ""), printed
        assert len(fields(tmp_path / "out")) == stops[number]
        assert os.readlink(tmp_path / "out" / "best") == f"step-{best:08d}"
    train(2, tmp_path / "out", *flags, "--steps", "40", "--patience", "3")
    assert_same_run(tmp_path / "out", stopped[0])
    assert losses(tmp_path / "out") == losses(stopped[0])


@pytest.fixture
def again(stopped, tmp_path):
    return shutil.copytree(stopped[0], tmp_path / "out", symlinks=True)


@needs_mpiexec
def test_it_stays_as_it_is_until_more_patience_is_given(again, endless, flags):
    last, _ = expected_end(endless, 3)
    (line,) = train(2, again, *flags, "--steps", "40", "--patience", "3").splitlines()
    assert f"step {last}, where the run stopped early, {WHY}" in line
    end, _ = expected_end(endless, 5)
    train(2, again, *flags, "--steps", "40", "--patience", "5")
    assert losses(again) == {step: loss for step, loss in endless.items() if step <= end}


@needs_mpiexec
def test_best_is_of_the_run_that_goes_on(again, endless, flags, tmp_path):
    """`best` may be the last checkpoint. A run that starts over drops the link and later sets a new one."""
    first = min(endless)
    output = train(2, tmp_path / "new", *flags, "--steps", str(first), "--patience", "3")
    assert f"{endless[first]:.4f} nats per token, of step {first}: " in output
    out = tmp_path / "new"
    assert os.readlink(out / "best") == os.readlink(out / "latest"), "the last checkpoint may be the best"
    train(1, again, *flags, "--steps", "1", "--resume", "never")
    assert not (again / "best").is_symlink()
    train(1, again, *flags, "--steps", "2", "--patience", "9")
    assert os.readlink(again / "best") == "step-00000002"


@needs_mpiexec
def test_a_best_that_lies_elsewhere_is_not_taken_for_one_here(stopped, endless, flags, tmp_path):
    """A run resumed in another folder does not link `best` to that folder's checkpoint of the best step."""
    last, best = expected_end(endless, 3)
    other = tmp_path / "other"
    train(1, other, *flags, "--steps", str(best), "--lr", "0.001", "--patience", "40")
    assert os.readlink(other / "best") == f"step-{best:08d}"
    worse = ["--steps", str(last + 1), "--patience", "9", "--lr", "3"]
    output = train(1, other, *flags, *worse, "--resume", str(stopped[0] / "latest"))
    assert losses(other)[last + 1] > endless[best]
    assert f"of step {best}: its checkpoint is not in this folder" in output
    assert not (other / "best").is_symlink()


@needs_mpiexec
@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--patience 0", "--patience 0"),
        ("--patience 2 --context 2000", "--patience 2"),
        ("--patience 2", "out/best "),
    ],
)
def test_bad_usage_is_one_line(more, named, flags, tmp_path):
    if named == "out/best ":  # replace the link by a folder
        (tmp_path / "out" / "best").mkdir(parents=True)
    assert named in refused(2, tmp_path / "out", *flags, *more.split())
