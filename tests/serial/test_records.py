"""Tests of metrics.jsonl and lines on a terminal: complete lines, full precision, each step once."""

import json
import math
import re

import pytest
from test_command_bits import SIZES, needs_mpiexec, train, write_text

from zero_mpi.telemetry import log, progress_bar
from zero_mpi.telemetry.metrics import Records, keep_until, last_step

FIELDS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds"}
COSTS = {"wait_seconds", "sent_bytes"}


def record(step, **extra):
    plain = {"loss": 0.1 + 0.2, "grad_norm": 1 / 3, "lr": 4e-3, "tokens": 64 * step}
    return {"step": step, **plain, "tokens_per_second": 1234.5, "step_seconds": 0.05, **extra}


def write(out, steps, *, done=0, rank=0, total=4, log_every=1):
    records = Records(out, rank, done=done, steps=total, log_every=log_every)
    for entry in steps:
        records.step(entry if isinstance(entry, dict) else record(entry))
    records.close()


def read(out):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    text = (out / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(entry, parse_constant=refuse) for entry in text.splitlines()]


@pytest.fixture(autouse=True)
def nobody_watches(monkeypatch):
    """Make runs print log lines instead of a progress bar, wherever the tests run."""
    monkeypatch.setattr(progress_bar, "watched", lambda: False)
    log.install(0, 1)
    yield
    log.remove()


@needs_mpiexec
def test_the_command_records_what_is_promised(tmp_path):
    """Every step has all fields; only evaluations and the last step have a val_loss."""
    flags = ["--steps", "3", "--eval-every", "2", "--warmup", "4", "--lr", "0.004", "--sample", "0"]
    flags += ["--batch-size", "4", "--micro-batch", "2", "--data", *write_text(tmp_path)]
    train(2, tmp_path / "out", *SIZES, *flags)
    entries = read(tmp_path / "out")
    assert all(entry.keys() >= FIELDS | COSTS for entry in entries)
    assert len({entry["sent_bytes"] for entry in entries}) == 1, "all steps send equal bytes"
    assert all(0 < entry["wait_seconds"] < entry["step_seconds"] for entry in entries)
    assert [(entry["step"], entry["tokens"]) for entry in entries] == [(1, 64), (2, 128), (3, 192)]
    assert ["val_loss" in entry for entry in entries] == [False, True, True]
    assert [entry["lr"] for entry in entries] == pytest.approx([0.001, 0.002, 0.003])
    for entry in entries:
        assert entry["tokens_per_second"] == pytest.approx(64 / entry["step_seconds"])
        assert 0 < entry["grad_norm"] < 100
        assert 4 < entry["loss"] < 7


def test_floats_come_back_to_the_last_bit(tmp_path):
    values = [0.1 + 0.2, 1 / 3, math.nextafter(5.0, 6.0), 5e-324, 1.7976931348623157e308]
    write(tmp_path, [record(number, loss=value) for number, value in enumerate(values, 1)])
    assert [entry["loss"] for entry in read(tmp_path)] == values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(value, tmp_path):
    nested = {"val_losses": {"a": value, "b": 1.5}, "seconds": [value]}
    write(tmp_path, [record(1, loss=value, grad_norm=value, **nested)])
    (entry,) = read(tmp_path)
    assert (entry["loss"], entry["grad_norm"], entry["seconds"]) == (None, None, [None])
    assert entry["val_losses"] == {"a": None, "b": 1.5}
    assert entry["lr"] == 4e-3


def test_a_resumed_run_goes_on_after_the_steps_that_are_done_and_one_that_starts_over_keeps_nothing(tmp_path):
    write(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    write(tmp_path, [record(3, loss=7.0), 4], done=2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:2] == before[:2]
    assert [(entry["step"], entry["loss"] == 7.0) for entry in read(tmp_path)][2:] == [(3, True), (4, False)]
    write(tmp_path, [], done=0)
    assert read(tmp_path) == []


TAILS = [b'{"step": 3, "lo', b"{", b"\0\0\0\0", b"[3]", b"3", b"null", b'{"loss": 1.0}', b'{"step": "3"}']


@pytest.mark.parametrize("tail", [*TAILS, b'{"step": null}', b"\xff\xfe\x80"])
def test_what_is_no_record_is_dropped(tail, tmp_path):
    """A resume accepts any bytes at the file's end, because a crash may leave them in the last block."""
    write(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + tail)
    keep_until(path, 3)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("", 0),
        ('{"step": 7}\n', 7),
        ('{"step": 7}\n{"step": 8, "lo', 7),
        ('{"step": 7}\n' + '{"step": 8}' + " " * 70000 + "\n\n", 8),
        ("[3]\n{}\nnull\n", 0),
    ],
)
def test_the_last_whole_record_is_found_from_the_end(text, step, tmp_path):
    path = tmp_path / "metrics.jsonl"
    keep_until(path, 5)
    assert path.read_text() == "", "a new file must be empty"
    path.unlink()
    assert last_step(path) == 0, "no file"
    path.write_text(text)
    assert last_step(path) == step
    path.write_text('{"step": 1, "x": "' + "y" * 2**18 + '"}\n' + text)
    assert last_step(path) == step, "it reads only a large file's end"


def test_log_lines_come_first_now_and_then_at_evaluations_each_minute_and_last(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress_bar.time, "perf_counter", iter(range(0, 999, 25)).__next__)  # seconds
    write(tmp_path, [1, 2, record(3, val_loss=5.25), 4, 5, 6, 7], total=7, log_every=4)
    printed = capsys.readouterr().out.splitlines()
    assert [int(re.match(r"step (\d)/7 ", text)[1]) for text in printed] == [1, 3, 3, 4, 6, 7]
    assert printed[2] == "step 3/7  val loss 5.2500"
    assert sum("val loss" in text for text in printed) == 1


def test_a_bar_is_shown_where_somebody_watches(tmp_path, capsys, monkeypatch):
    """The progress bar and notes use one stream, and each note has its own line."""
    monkeypatch.setattr(progress_bar, "watched", lambda: True)
    records = Records(tmp_path, 0, done=1, steps=4, log_every=1)
    records.step(record(2, mfu=0.25, memory_bytes=[2**30], val_loss=5.25))
    log.info("a note")
    records.close()
    log.info("a word after it")
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.replace("\r", "\n").splitlines()
    assert {"a note", "a word after it", "step 2/4  val loss 5.2500"} <= set(lines)
    (bar,) = {text for text in lines if "2/4, " in text}
    assert "50%|" in bar
    assert "loss 0.3000, 1.23k tok/s, 25% of peak, 1.0 GiB, " in bar
    assert len(bar) <= 80
    assert [entry["step"] for entry in read(tmp_path)] == [2]
