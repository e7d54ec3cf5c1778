"""Trackers: Prometheus' file, Weights & Biases and MLflow are told what `metrics.jsonl` says, and may fail.

The last two are stood in for by modules that note what they are asked; where the libraries are installed, a
run is followed into their files as well.
"""

import importlib.util
import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
from jobs import run_job
from prometheus_client.parser import text_string_to_metric_families
from test_command_bits import SIZES, needs_mpiexec, train, write_text

from zero_mpi.errors import JobError, UsageError
from zero_mpi.telemetry import trackers
from zero_mpi.telemetry.trackers import mlflow, prometheus, tracker, wandb
from zero_mpi.telemetry.trackers.tracker import Guarded, TrackedJob

RECORD = {"step": 3, "loss": 2.5, "lr": 0.25, "tokens": 96, "skipped": 0, "memory_bytes": [1024.0, 2048.0]}
TAGGED = {"loss": 2.5, "lr": 0.25, "memory_bytes/largest": 2048.0}
TAGGED |= {"memory_bytes/rank_00": 1024.0, "memory_bytes/rank_01": 2048.0}


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(tracker.log, "warning", lambda form, *values: said.append(form % values))
    return said


def parsed(path):
    """{(name, run, rank): value} of a text file, read by Prometheus' own parser."""
    return {
        (sample.name, sample.labels["run"], sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def test_a_record_is_read_back_from_the_text_file(tmp_path):
    file = prometheus.TextFile(tmp_path, tmp_path / "runs" / "my run")
    file.step(RECORD)
    run = str(tmp_path / "runs" / "my run")
    found = {
        (name.removeprefix("zero_mpi_"), of, rank): value
        for (name, of, rank), value in parsed(file.path).items()
    }
    numbers = {"step": 3, "tokens": 96, "skipped": 0, "loss": 2.5, "lr": 0.25, "memory_bytes_largest": 2048}
    expected = {(name, run, None): value for name, value in (numbers | {"running": 1}).items()}
    assert found == expected | {("memory_bytes", run, "0"): 1024, ("memory_bytes", run, "1"): 2048}
    assert os.listdir(tmp_path) == [file.path.name], "what is written beside it is gone"
    assert file.path.name.startswith("zero_mpi_my_run_")


def test_the_file_is_written_once_a_second_and_at_the_end(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(prometheus.time, "monotonic", lambda: clock.now)
    file = prometheus.TextFile(tmp_path, tmp_path / "out")
    run, seen = str(tmp_path / "out"), []
    for step, moment in ((1, 100.0), (2, 100.5), (3, 101.0), (4, 101.9)):
        clock.now = moment
        file.step({"step": step, "loss": 1.0 / step} | ({"val_loss": 7.0} if step == 2 else {}))
        seen.append(parsed(file.path)["zero_mpi_step", run, None])
    assert seen == [1, 1, 3, 3]
    assert parsed(file.path)["zero_mpi_val_loss", run, None] == 7.0, "of a step that was not written"
    file.close()
    at_end = parsed(file.path)
    assert (at_end["zero_mpi_step", run, None], at_end["zero_mpi_running", run, None]) == (4, 0)


def test_two_runs_of_one_name_have_two_files(tmp_path):
    files = {prometheus.TextFile(tmp_path, tmp_path / at / "out").path for at in ("a", "b")}
    assert len(files) == 2


def test_a_missing_folder_of_the_collector_is_said(tmp_path):
    with pytest.raises(UsageError, match="folder"):
        trackers.check(SimpleNamespace(**NONE | {"prometheus": str(tmp_path / "no")}))


@pytest.fixture
def fake_wandb(monkeypatch):
    noted = SimpleNamespace(init=None, logged=[], finished=False)

    def init(**given):
        noted.init = given
        return SimpleNamespace(
            log=lambda numbers, step: noted.logged.append((step, numbers)),
            finish=lambda: setattr(noted, "finished", True),
        )

    fake = SimpleNamespace(init=init, Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return noted


def test_weights_and_biases_is_told_each_step_by_its_number(fake_wandb, tmp_path):
    tracker = wandb.begin(TrackedJob(tmp_path / "out", 2, {"lr": 0.5}), "project")
    tracker.step(RECORD)
    tracker.close()
    assert fake_wandb.logged == [(3, TAGGED)]
    assert fake_wandb.finished
    given = fake_wandb.init
    assert (given["project"], given["group"], given["dir"]) == ("project", "out", str(tmp_path / "out"))
    assert given["config"] == {"lr": 0.5}
    assert given["settings"]["console"] == "off"


@pytest.fixture
def fake_mlflow(monkeypatch):
    noted = SimpleNamespace(params=[], metrics=[], ended=[], experiments=[], tags={}, requests=0, fails=None)

    class Client:
        def get_experiment_by_name(self, name):
            """None is known."""

        def create_experiment(self, name):
            noted.experiments.append(name)
            return "7"

        def create_run(self, number, run_name, tags):
            noted.tags = tags
            return SimpleNamespace(info=SimpleNamespace(run_id=f"run of {number}"))

        def log_batch(self, run, metrics=(), params=()):
            assert len(metrics) <= 1000
            assert len(params) <= 100
            noted.requests += 1
            if noted.fails and metrics:
                raise noted.fails
            noted.params += params
            noted.metrics += metrics

        def set_terminated(self, run):
            noted.ended.append(run)

    entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    return noted


def test_mlflow_is_told_each_step_and_all_settings(fake_mlflow, tmp_path):
    settings = {f"setting_{number}": "x" * 600 for number in range(130)}
    tracker = mlflow.begin(TrackedJob(tmp_path / "out", 2, settings), "experiment")
    tracker.step(RECORD)
    tracker.close()
    assert {(tag, value, step) for tag, value, _, step in fake_mlflow.metrics} == {
        (tag, value, 3) for tag, value in TAGGED.items()
    }
    assert [name for name, _ in fake_mlflow.params] == list(settings)
    assert all(len(value) == 500 for _, value in fake_mlflow.params)
    assert (fake_mlflow.experiments, fake_mlflow.ended) == (["experiment"], ["run of 7"])
    assert fake_mlflow.tags == {"zero_mpi.run": str(tmp_path / "out"), "zero_mpi.from_step": "2"}


def test_many_fast_steps_are_few_requests(fake_mlflow, tmp_path):
    tracker = mlflow.begin(TrackedJob(tmp_path / "out", 0, {}), "experiment")
    begun = time.monotonic()
    for step in range(1, 2001):
        tracker.step({"step": step, "loss": 1.0})
    tracker.close()
    assert [step for *_, step in fake_mlflow.metrics] == list(range(1, 2001))
    assert fake_mlflow.requests <= 2 * (time.monotonic() - begun) + 4


def test_a_server_that_fails_is_said_once_and_ends_nothing(fake_mlflow, warnings, tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow, "EVERY_SECONDS", 0.0)
    fake_mlflow.fails = ConnectionError("no\nroute")
    tracker = mlflow.begin(TrackedJob(tmp_path / "out", 0, {}), "experiment")
    tracker.step({"step": 1, "loss": 1.0})
    tracker._tracker._sender.join(30)
    for step in (2, 3):
        tracker.step({"step": step, "loss": 1.0})
    tracker.close()
    (said,) = warnings
    assert said.startswith("--mlflow: ConnectionError: no")
    assert "\n" not in said


def test_a_tracker_that_cannot_begin_is_one_line():
    def begin():
        raise RuntimeError("api_key not configured\n(no-tty)")

    with pytest.raises(JobError, match=r"^--wandb: RuntimeError: api_key not configured.*no-tty") as error:
        Guarded("--wandb", begin)
    assert "\n" not in str(error.value)


def test_the_end_waits_no_longer_than_its_limit(warnings, monkeypatch):
    monkeypatch.setattr(tracker, "CLOSE_SECONDS", 0.05)
    hanging = SimpleNamespace(step=None, close=lambda: time.sleep(5))
    Guarded("--wandb", lambda: hanging).close()
    (said,) = warnings
    assert said.startswith("--wandb: ")
    assert "within 0 s" in said


EXTRAS = {
    "tensorboard": "tensorboardX",
    "prometheus": "prometheus_client",
    "wandb": "wandb",
    "mlflow": "mlflow",
}
NONE = {"tensorboard": False, "prometheus": None, "wandb": None, "mlflow": None}


@pytest.mark.parametrize(("name", "extra"), EXTRAS.items())
def test_a_missing_library_is_said_with_what_to_install(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(UsageError, match=rf"^--{name} .*{extra} .*'zero-mpi\[{name}\]'"):
        trackers.check(SimpleNamespace(**NONE | {name: "."}))


def records(out):
    return {line["step"]: line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())}


@needs_mpiexec
def test_a_run_leaves_its_last_record_in_the_text_file(tmp_path):
    folder, out = tmp_path / "collector", tmp_path / "out"
    folder.mkdir()
    flags = [*SIZES, "--data", *write_text(tmp_path), "--steps", "3", "--prometheus", str(folder)]
    train(2, out, *flags)
    (path,) = folder.iterdir()
    found, last = parsed(path), records(out)[3]
    for name in ("step", "loss", "lr", "grad_norm", "tokens", "val_loss"):
        assert found[f"zero_mpi_{name}", str(out), None] == last[name]
    assert found["zero_mpi_memory_bytes", str(out), "1"] == last["memory_bytes"][1]
    assert found["zero_mpi_running", str(out), None] == 0


@needs_mpiexec
def test_runs_are_followed_into_the_files_of_the_libraries(tmp_path):
    missing = [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}: pip install 'zero-mpi[wandb,mlflow]'")
    out, store = tmp_path / "out", tmp_path / "mlruns"
    environ = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": store.as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    flags = [*SIZES, "--data", *write_text(tmp_path), "--steps", "3", "--out", str(out)]
    flags += ["--wandb", "project", "--mlflow", "experiment"]
    status, printed, errors = run_job(2, ["-m", "zero_mpi.train", *flags], env=environ, timeout=120)
    assert status == 0, printed + errors
    losses = {step: record["loss"] for step, record in records(out).items()}
    (metric,) = store.glob("*/*/metrics/loss")
    rows = [line.split() for line in metric.read_text().splitlines()]
    assert {int(step): float(value) for _, value, step, *_ in rows} == losses
    (kept,) = out.glob("wandb/offline-run-*/run-*.wandb")
    for loss in losses.values():
        assert json.dumps(loss).encode() in kept.read_bytes()
