"""TensorBoard, Prometheus, Weights & Biases and MLflow get every number; their failures do not end a run."""

import importlib.util
import json
import os
import struct
import sys
import time
from types import SimpleNamespace

import pytest
from jobs import run_job
from prometheus_client.parser import text_string_to_metric_families
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog
from test_command_bits import SIZES, needs_mpiexec, train, write_text

from zero_mpi.errors import JobError, UsageError
from zero_mpi.telemetry import trackers
from zero_mpi.telemetry.trackers import MOST_RANKS, Guarded, TrackedJob, numbers

RECORD = {"step": 3, "loss": 2.5, "lr": 0.25, "tokens": 96, "rewards/margins": 0.5}
RECORD |= {"memory_bytes": [1024.0, 2048.0], "val_losses": {"my text": 1.5}}
TAGGED = {"loss": 2.5, "lr": 0.25, "tokens": 96, "rewards/margins": 0.5, "val_losses/my_text": 1.5}
TAGGED |= {"memory_bytes/largest": 2048.0, "memory_bytes/rank_00": 1024.0, "memory_bytes/rank_01": 2048.0}
EXTRAS = {"tensorboard": "tensorboardX", "prometheus": "prometheus_client"}
EXTRAS |= {"wandb": "wandb", "mlflow": "mlflow"}
NONE = {"tensorboard": False, "prometheus": None, "wandb": None, "mlflow": None}


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(trackers.log, "warning", lambda form, *values: messages.append(form % values))
    return messages


def begun(name, out, wish=True):
    """Start and return the tracker `name` as a run does."""
    (one,) = trackers.begin(SimpleNamespace(**NONE | {name: wish}), TrackedJob(out, 0, {}))
    return one


def test_the_numbers_of_a_record_are_found_by_what_they_are():
    odd = {"flag": True, "name": "x", "none": None, "micro_batch_seconds": [None, 2.0], "nothing": [None]}
    extra = {"micro_batch_seconds/largest": 2.0, "micro_batch_seconds/rank_01": 2.0}
    assert dict(numbers(RECORD | odd)) == TAGGED | extra
    many = [2.0**20 * rank for rank in range(MOST_RANKS + 1)]
    assert list(numbers({"memory_bytes": many})) == [("memory_bytes/largest", many[-1])]


# ------------------------------------------------------------------------------------------ TensorBoard


def masked(data):
    """Return the checksum of TensorBoard's format: a CRC-32C, rotated, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(path):
    data, messages = path.read_bytes(), []
    while data:
        (length,), (of_length,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        body, (of_body,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert (of_length, of_body) == (masked(data[:8]), masked(body))
        messages.append(Event.FromString(body))
        data = data[16 + length :]
    return messages


def curves(folder):
    """Return tag -> {step: value} as TensorBoard does: a start mark drops its step and later ones."""
    series = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in events(path):
            if event.session_log.status == SessionLog.START:
                series = {
                    tag: {step: value for step, value in curve.items() if step < event.step}
                    for tag, curve in series.items()
                }
            for value in event.summary.value:
                series.setdefault(value.tag, {})[event.step] = value.simple_value
    return series


def test_a_record_is_one_event_of_its_tags(tmp_path):
    board = begun("tensorboard", tmp_path)
    board.step(RECORD | {"grad_norm": float("inf")})
    assert curves(tmp_path)["loss"] == {3: 2.5}, "it is there at once"
    board.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    version, mark, event = events(path)
    assert version.file_version == "brain.Event:2"
    assert (mark.step, mark.session_log.status, event.step) == (1, SessionLog.START, 3)
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert values == TAGGED | {"grad_norm": float("inf")}


@needs_mpiexec
def test_a_run_and_its_resume_have_all_tags_at_all_steps(tmp_path):
    flags = [*SIZES, "--sample", "0", "--batch-size", "4", "--warmup", "2", "--tensorboard"]
    flags += ["--data", *write_text(tmp_path), "--eval-every", "2", "--log-every", "3"]
    out = tmp_path / "out"
    train(2, out, *flags, "--steps", "3", "--save-every", "2")
    train(2, out, *flags, "--steps", "4", "--resume", str(out / "step-00000002"))
    assert len(list((out / "tensorboard").iterdir())) == 2
    actual, last = curves(out), records(out)
    expected = {tag: {} for line in last.values() for tag, _ in numbers(line)}
    for step, line in last.items():
        for tag, value in numbers(line):
            expected[tag][step] = pytest.approx(value, rel=1e-6)
    assert actual == expected, "step 3 of the first job was not the last one of the run"
    assert set(actual["val_loss"]) == {2, 4}


# ------------------------------------------------------------------------------------------- Prometheus


def parsed(path):
    """Return {(name, run, rank): value} of a text file, read by Prometheus' own parser."""
    return {
        (sample.name, sample.labels["run"], sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def text_file(folder, out):
    return trackers.Prometheus(TrackedJob(out, 0, {}), str(folder))


def test_a_record_is_read_back_from_the_text_file(tmp_path):
    run = tmp_path / "runs" / "my run"
    file = text_file(tmp_path, run)
    file.step(RECORD)
    actual = {
        (name.removeprefix("zero_mpi_"), rank): value for (name, _, rank), value in parsed(file.path).items()
    }
    numbers = {"step": 3, "tokens": 96, "loss": 2.5, "lr": 0.25, "memory_bytes_largest": 2048, "running": 1}
    numbers |= {"rewards_margins": 0.5, "val_losses_my_text": 1.5}
    ranks = {("memory_bytes", "0"): 1024, ("memory_bytes", "1"): 2048}
    assert actual == {(name, None): value for name, value in numbers.items()} | ranks
    assert {of for _, of, _ in parsed(file.path)} == {str(run)}
    assert os.listdir(tmp_path) == [file.path.name], "no temporary file may stay"
    assert file.path.name.startswith("zero_mpi_my_run_")
    assert text_file(tmp_path, tmp_path / "elsewhere" / "my run").path != file.path


def test_the_file_is_written_once_a_second_and_at_the_end(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(trackers.time, "monotonic", lambda: clock.now)
    file = text_file(tmp_path, tmp_path / "out")
    run, seen = str(tmp_path / "out"), []
    for step, moment in ((1, 100.0), (2, 100.5), (3, 101.0), (4, 101.9)):
        clock.now = moment
        file.step({"step": step, "loss": 1.0 / step} | ({"val_loss": 7.0} if step == 2 else {}))
        seen.append(parsed(file.path)["zero_mpi_step", run, None])
    assert seen == [1, 1, 3, 3]
    assert parsed(file.path)["zero_mpi_val_loss", run, None] == 7.0, "the val_loss of step 2 must stay"
    file.close()
    at_end = parsed(file.path)
    assert (at_end["zero_mpi_step", run, None], at_end["zero_mpi_running", run, None]) == (4, 0)


# ------------------------------------------------------------------------------ Weights & Biases, MLflow


def test_a_server_that_fails_is_said_once_and_ends_nothing(warnings, tmp_path, monkeypatch):
    def refuse(run, metrics=(), params=()):
        if metrics:
            raise ConnectionError("no\nroute")

    client = SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="7"),
        create_run=lambda number, run_name, tags: SimpleNamespace(info=SimpleNamespace(run_id="run")),
        log_batch=refuse,
    )
    parts = {
        "tracking": {"MlflowClient": lambda: client},
        "entities": {"Metric": lambda *values: values, "Param": None},
    }
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"mlflow.{name}", SimpleNamespace(**part))
    monkeypatch.setattr(trackers, "EVERY_SECONDS", 0.0)
    one = begun("mlflow", tmp_path / "out", "experiment")
    one.step({"step": 1, "loss": 1.0})
    one._tracker._sender.join(30)
    for step in (2, 3):
        one.step({"step": step, "loss": 1.0})
    one.close()
    (message,) = warnings
    assert message.startswith("--mlflow: ConnectionError: no")
    assert "\n" not in message


def test_a_tracker_that_cannot_begin_is_one_line():
    def begin():
        raise RuntimeError("api_key not configured\n(no-tty)")

    with pytest.raises(JobError, match=r"^--wandb: RuntimeError: api_key not configured.*no-tty") as error:
        Guarded("--wandb", begin)
    assert "\n" not in str(error.value)


def test_the_end_waits_no_longer_than_its_limit(warnings, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    hanging = SimpleNamespace(step=None, close=lambda: time.sleep(5))
    Guarded("--wandb", lambda: hanging).close()
    (message,) = warnings
    assert message.startswith("--wandb: ")


# ------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(("name", "extra"), EXTRAS.items())
def test_a_missing_library_is_said_with_what_to_install(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(UsageError, match=rf"^--{name} .*{extra} .*'zero-mpi\[{name}\]'"):
        trackers.check(SimpleNamespace(**NONE | {name: "."}))


def records(out):
    return {line["step"]: line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())}


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
    (file,) = out.glob("wandb/offline-run-*/run-*.wandb")
    for loss in losses.values():
        assert json.dumps(loss).encode() in file.read_bytes()
