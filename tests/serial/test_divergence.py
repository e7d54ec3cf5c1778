"""A diverged run ends with status 1; single non-finite steps and the fp16 scale search do not."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import run_job
from test_command_bits import fields, needs_mpiexec, write_text
from test_failures import SMALL
from test_stopping import told

from zero_mpi.errors import JobError
from zero_mpi.optim.optimizer import StepResult
from zero_mpi.train.observers import MOST, Divergence, StepMade, check_recorded

GOOD, SKIPPED, SEARCHED = (1.0, False, False), (1.0, True, False), (1.0, True, True)
LOST, BROKEN = (math.nan, True, True), (1.0, False, False, {"val_loss": math.nan})


def steps(*rows: tuple[Any, ...]) -> Divergence:
    divergence = Divergence(scale := SimpleNamespace(dynamic=False, exponent=1))
    for number, (loss, skipped, scale.dynamic, *record) in enumerate(rows, 1):
        divergence.ends(StepMade(number, loss, StepResult(0.0, skipped), 0.0, *record))
    return divergence


@pytest.mark.parametrize("bad", [SKIPPED, LOST, (math.inf, False, False)])
def test_many_steps_in_a_row_that_are_not_finite_end_a_run(bad):
    steps(*[bad] * (MOST - 1), GOOD, *[bad] * (MOST - 1))
    with pytest.raises(JobError, match=f" {MOST} steps in a row, up to step {MOST + 1}.* --lr"):
        steps(GOOD, *[bad] * MOST)


def test_a_search_for_the_factor_of_float16_does_not():
    divergence = steps(*[SEARCHED] * (2 * MOST))
    divergence.check_end(2 * MOST)
    steps(*[SKIPPED] * (MOST - 1), SEARCHED, GOOD)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ([GOOD, LOST], "the loss of the last step (2) is not finite"),
        ([GOOD, BROKEN], "the loss of the last step (2) is not finite"),
        ([BROKEN, GOOD], ""),
        ([SKIPPED, SKIPPED], "no step up to 2 had a finite gradient"),
        ([GOOD, SKIPPED], ""),
        ([LOST, GOOD], ""),
        ([], ""),
    ],
)
def test_a_run_that_ends_so_is_not_done(made, reason):
    divergence = steps(*made)
    assert divergence.worth_saving(2) == ("(2)" not in reason)
    if not reason:
        divergence.check_end(2)
        return
    with pytest.raises(JobError) as caught:
        divergence.check_end(2)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize("name", ["loss", "val_loss"])
def test_a_finished_run_without_a_finite_loss_has_failed(name, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 2, "loss": 1.0, "val_loss": 1.0} | {name: None})
    )
    check_recorded(tmp_path, 1)
    with pytest.raises(JobError):
        check_recorded(tmp_path, 2)


@needs_mpiexec
@pytest.mark.parametrize(
    ("total", "reason"), [(8, "the loss of the last step (8)"), (999, f"in {MOST} steps in a row")]
)
def test_a_run_whose_loss_is_nan_has_failed(total, reason, tmp_path):
    flags = [*SMALL, "--data", *write_text(tmp_path), "--out", str(tmp_path / "out"), "--lr", "1e38"]
    for _ in range(2):
        command = ["-m", "zero_mpi.train", *flags, "--steps", str(total)]
        status, printed, errors = run_job(2, command, timeout=30)
        assert status == 1, printed
        (line,) = (text for text in errors.splitlines() if text.startswith("zero_mpi"))  # NumPy warns too
        assert "Traceback" not in errors
        assert reason in line
        assert told(tmp_path / "out") == ("failed", line.removeprefix("zero_mpi train: error: "))
    assert fields(tmp_path / "out")[-1][1] is None
    assert not list((tmp_path / "out").glob("*step-*")), "weights that are not finite were saved"
