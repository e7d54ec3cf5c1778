"""What a run leaves in metrics.jsonl and in a log: whole lines, full precision, no step twice."""

import json
import math
import re

import pytest
from test_command_bits import SIZES, needs_mpiexec, train, write_text

from zero_mpi import records
from zero_mpi.records import Records, keep_until, line

FIELDS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds"}
COSTS = {"wait_seconds", "sent_bytes"}


def record(step, **more):
    """A record as the training loop makes it."""
    plain = {"loss": 0.1 + 0.2, "grad_norm": 1 / 3, "lr": 4e-3, "tokens": 64 * step}
    return {"step": step, **plain, "tokens_per_second": 1234.5, "step_seconds": 0.05, **more}


def write(out, steps, *, done=0, rank=0, total=4, log_every=1):
    """Write records of `steps`; keyword arguments as of Records."""
    written = Records(out, rank, done=done, steps=total, log_every=log_every)
    for entry in steps:
        written.step(entry if isinstance(entry, dict) else record(entry))
    written.close()


def read(out):
    """The records of a run, refusing what is not JSON: Python's reader would take a NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    text = (out / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(entry, parse_constant=refuse) for entry in text.splitlines()]


@pytest.fixture(autouse=True)
def nobody_watches(monkeypatch):
    """Lines and no bar, wherever the tests are started from."""
    monkeypatch.setattr(records, "watched", lambda: False)


def test_records_are_one_json_object_a_line_from_step_one(tmp_path):
    write(tmp_path, [1, 2, record(3, val_loss=5.5)])
    found = read(tmp_path)
    assert [entry["step"] for entry in found] == [1, 2, 3]
    assert all(entry.keys() >= FIELDS for entry in found)
    assert [entry.get("val_loss") for entry in found] == [None, None, 5.5]


@needs_mpiexec
def test_the_command_records_what_is_promised(tmp_path):
    """Every step has the fields; where an evaluation is due, and at the end, there is a val_loss."""
    flags = ["--steps", "3", "--eval-every", "2", "--warmup", "4", "--lr", "0.004", "--sample", "0"]
    flags += ["--batch-size", "4", "--micro-batch", "2", "--data", *write_text(tmp_path)]
    train(2, tmp_path / "out", *SIZES, *flags)
    found = read(tmp_path / "out")
    assert all(entry.keys() >= FIELDS | COSTS for entry in found)
    assert len({entry["sent_bytes"] for entry in found}) == 1, "the same every step"
    assert all(0 < entry["wait_seconds"] < entry["step_seconds"] for entry in found)
    assert [(entry["step"], entry["tokens"]) for entry in found] == [(1, 64), (2, 128), (3, 192)]
    assert ["val_loss" in entry for entry in found] == [False, True, True]
    assert [entry["lr"] for entry in found] == pytest.approx([0.001, 0.002, 0.003])
    for entry in found:
        assert entry["tokens_per_second"] == pytest.approx(64 / entry["step_seconds"])
        assert 0 < entry["grad_norm"] < 100
        assert 4 < entry["loss"] < 7


def test_floats_come_back_to_the_last_bit(tmp_path):
    values = [0.1 + 0.2, 1 / 3, math.nextafter(5.0, 6.0), 5e-324, 1.7976931348623157e308]
    write(tmp_path, [record(number, loss=value) for number, value in enumerate(values, 1)])
    assert [entry["loss"] for entry in read(tmp_path)] == values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(value, tmp_path):
    write(tmp_path, [record(1, loss=value, grad_norm=value)])
    (entry,) = read(tmp_path)
    assert (entry["loss"], entry["grad_norm"]) == (None, None)
    assert entry["lr"] == 4e-3


def test_records_are_there_as_soon_as_they_are_made(tmp_path):
    """A run that is killed has lost none of its steps."""
    written = Records(tmp_path, 0, done=0, steps=4, log_every=1)
    written.step(record(1))
    assert len(read(tmp_path)) == 1
    written.close()


def test_only_rank_0_writes(tmp_path, capsys):
    write(tmp_path, [1, 2], rank=1)
    Records(tmp_path, 1, done=0, steps=4, log_every=1).say("hello")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_resumed_run_goes_on_after_the_steps_that_are_done(tmp_path):
    write(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    write(tmp_path, [record(3, loss=7.0), 4], done=2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:2] == before[:2]
    assert [(entry["step"], entry["loss"] == 7.0) for entry in read(tmp_path)][2:] == [(3, True), (4, False)]


def test_a_run_that_starts_over_keeps_nothing(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [], done=0)
    assert read(tmp_path) == []


@pytest.mark.parametrize(
    "tail",
    [
        '{"step": 3, "lo',
        "{",
        "\0\0\0\0",
        "[3]",
        "3",
        "null",
        '{"loss": 1.0}',
        '{"step": "3"}',
        '{"step": null}',
    ],
)
def test_what_is_no_record_is_dropped(tail, tmp_path):
    write(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + tail)
    keep_until(path, 3)
    assert path.read_text() == whole


def test_a_line_of_broken_bytes_is_dropped(tmp_path):
    """A machine that goes down may leave anything in the last block."""
    write(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\xff\xfe\x80")
    keep_until(path, 2)
    assert path.read_bytes() == whole


def test_keeping_leaves_the_text_of_records_as_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,   "loss": 1.50}\n{"step": 2, "loss": 2e0}\n')
    keep_until(path, 1)
    assert path.read_text() == '{"step":1,   "loss": 1.50}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_keeping_makes_an_empty_file_where_none_was(tmp_path):
    keep_until(tmp_path / "metrics.jsonl", 5)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_log_lines_come_now_and_then_at_evaluations_and_at_the_end(tmp_path, capsys):
    write(tmp_path, [1, 2, record(3, val_loss=5.25), 4, 5, 6, 7], total=7, log_every=4)
    printed = capsys.readouterr().out.splitlines()
    assert [int(re.match(r"step (\d)/7 ", text)[1]) for text in printed] == [3, 4, 7]
    assert "val loss 5.2500" in printed[0]
    assert "val loss" not in printed[1]


def test_a_log_line_says_loss_norm_rate_and_speed():
    text = line(record(12, loss=2.5), 100)
    assert text == "step  12/100  loss 2.5000  grad norm 0.333  lr 4.00e-03  1234 tokens/s"


def test_a_log_is_plain_text(tmp_path, capsys):
    """No bar, no control characters, nothing on stderr where nobody watches."""
    write(tmp_path, [1, 2, 3, 4])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", printed.out)


def test_a_bar_is_shown_where_somebody_watches(tmp_path, capsys, monkeypatch):
    """Bar and notes go to one stream, each note on a line of its own; the file is the same."""
    monkeypatch.setattr(records, "watched", lambda: True)
    written = Records(tmp_path, 0, done=1, steps=4, log_every=1)
    written.step(record(2))
    written.say("a note")
    written.close()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "a note" in printed.err.replace("\r", "\n").splitlines()
    assert "2/4" in printed.err
    assert [entry["step"] for entry in read(tmp_path)] == [2]
