"""TensorBoard's files: the records of a run under their tags, and a mark where a resume goes back."""

import struct

import pytest
from jobs import run_job
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog
from test_command_bits import SIZES, needs_mpiexec, train, write_text

from zero_mpi.telemetry.trackers.tensorboard import TensorBoard
from zero_mpi.telemetry.trackers.tracker import MOST_RANKS, TAGS, numbers

RECORD = {"step": 3, "loss": 2.5, "lr": 0.25, "grad_norm": float("inf"), "tokens_per_second": 1e6}
RECORD |= {"tokens": 9}


def masked(data):
    """The checksum of the format: a CRC-32C, turned and moved by a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(path):
    data, found = path.read_bytes(), []
    while data:
        (length,), (of_length,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        body, (of_body,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert (of_length, of_body) == (masked(data[:8]), masked(body))
        found.append(Event.FromString(body))
        data = data[16 + length :]
    return found


def curves(folder):
    """tag -> {step: value} as TensorBoard reads a folder: files by name, marks make it forget later steps."""
    found = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in events(path):
            if event.session_log.status == SessionLog.START:
                found = {
                    tag: {step: value for step, value in curve.items() if step < event.step}
                    for tag, curve in found.items()
                }
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_a_record_is_one_event_of_its_tags(tmp_path):
    board = TensorBoard(tmp_path, 0)
    board.step(RECORD)
    assert curves(tmp_path)["loss"] == {3: 2.5}, "it is there at once"
    board.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    version, mark, event = events(path)
    assert version.file_version == "brain.Event:2"
    assert (mark.step, mark.session_log.status) == (1, SessionLog.START)
    assert event.step == 3
    shown = {value.tag: value.simple_value for value in event.summary.value}
    assert shown == {"loss": 2.5, "lr": 0.25, "grad_norm": float("inf"), "tokens_per_second": 1e6}


def test_a_resume_goes_on_in_a_new_file_and_forgets_what_comes_again(tmp_path):
    for done, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        board = TensorBoard(tmp_path, done)
        for step in steps:
            board.step({"step": step, "loss": float(10 * done + step)})
        board.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert curves(tmp_path)["loss"] == {1: 1.0, 2: 2.0, 3: 23.0, 4: 24.0}


def test_memory_has_a_tag_for_each_rank_while_they_are_few():
    few, many = ([2.0**20 * rank for rank in range(count)] for count in (3, MOST_RANKS + 1))
    assert dict(numbers({"memory_bytes": few})) == {
        "memory_bytes/largest": 2.0**21,
        "memory_bytes/rank_00": 0.0,
        "memory_bytes/rank_01": 2.0**20,
        "memory_bytes/rank_02": 2.0**21,
    }
    assert list(numbers({"memory_bytes": many})) == [("memory_bytes/largest", many[-1])]


@needs_mpiexec
def test_a_run_and_its_resume_have_all_tags_at_all_steps(tmp_path):
    flags = [*SIZES, "--sample", "0", "--batch-size", "4", "--warmup", "2", "--tensorboard"]
    flags += ["--data", *write_text(tmp_path), "--eval-every", "2", "--log-every", "3"]
    train(2, tmp_path / "out", *flags, "--steps", "3", "--save-every", "2")
    train(2, tmp_path / "out", *flags, "--steps", "4", "--resume", str(tmp_path / "out" / "step-00000002"))
    found = curves(tmp_path / "out")
    assert {tag for tag in found if "/" not in tag} == set(TAGS)
    everywhere = {1, 2, 3, 4}
    assert all(set(found[tag]) == everywhere for tag in TAGS if tag != "val_loss")
    assert set(found["val_loss"]) == {2, 4}, "step 3 was the last one of the first job, not of the run"
    assert set(found["memory_bytes/rank_01"]) == {1, 2, 3, 4}
    assert all(value > 2**24 for value in found["memory_bytes/largest"].values())


WITHOUT = """
import sys

sys.modules["tensorboardX"] = None  # as if it were not installed
from zero_mpi.train import command as train_command

train_command.main()
"""


@needs_mpiexec
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_missing_library_is_one_line_before_anything_is_done(ranks, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT)
    flags = [*SIZES, "--data", *write_text(tmp_path), "--out", str(tmp_path / "out"), "--tensorboard"]
    status, printed, errors = run_job(ranks, [str(script), *flags], cwd=tmp_path)
    assert (status, printed, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("zero_mpi train: error: --tensorboard needs tensorboardX")
    assert "pip install 'zero-mpi[tensorboard]'" in errors
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
