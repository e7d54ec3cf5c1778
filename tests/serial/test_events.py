"""Tests of `events.jsonl`: every start, checkpoint, warning and end of a run, over all its jobs."""

import json
import re

import pytest
from test_command_bits import SIZES, needs_mpiexec, train, write_text

from zero_mpi.files.foreign import readable
from zero_mpi.launch.world import World
from zero_mpi.telemetry.events import Events
from zero_mpi.telemetry.status import Status
from zero_mpi.train.summary import Outcome

FLAGS = [*SIZES, "--sample", "5", "--batch-size", "4", "--warmup", "1", "--eval-every", "0"]


def read(out):
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def names(out):
    return [(entry["event"], entry["step"]) for entry in read(out)]


def test_entries_have_time_event_and_step_and_nothing_is_ever_cut(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"time": "2026')
    for step in (5, 2):
        events = Events(tmp_path, 0)
        events.begin(step, {}, ranks=4)
        events.at(7)
        events.note("saved", folder="step-00000007")
        events.end("stopped", "SIGTERM")
    first, *others = (tmp_path / "events.jsonl").read_text().splitlines()
    assert first == '{"time": "2026', "a new line follows an incomplete line"
    entries = [json.loads(line) for line in others]
    assert [(entry["event"], entry["step"]) for entry in entries] == [
        ("started", 5), ("saved", 7), ("stopped", 7), ("started", 2), ("saved", 7), ("stopped", 7),
    ]  # fmt: skip
    for entry in entries:
        assert list(entry)[:3] == ["time", "event", "step"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["time"])


ENDS = {0: "done", 75: "stopped", 1: "failed", 86: "failed", 2: None}


@pytest.mark.parametrize(("code", "word"), ENDS.items())
@pytest.mark.parametrize("before", ["done", "failed", "stopped", None])
def test_an_exit_status_is_the_last_word_and_no_job_before_is_lost(code, word, before, tmp_path):
    outcome = Outcome(tmp_path, World(0, 1), steps=9)
    outcome.open()
    outcome.events.begin(3, {"state": before} if before else {})
    outcome.end(code, "")
    assert names(tmp_path) == [("started", 3), *([(word, 3)] if word else [])]


def test_a_run_that_was_not_begun_is_no_event(tmp_path):
    """A refused run writes no events, but a failure before the start is an event."""
    for code in (2, 0):
        Outcome(tmp_path, World(0, 1), steps=9).end(code, "a bad flag")
    assert not (tmp_path / "events.jsonl").exists()
    Outcome(tmp_path, World(0, 1), steps=9).end(1, "no memory")
    assert names(tmp_path) == [("failed", 0)]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    out, flags = folder / "out", [*FLAGS, "--data", *write_text(folder)]
    train(2, out, *flags, "--steps", "3", "--save-every", "2")
    status = Status(out, 0, 2, 9)
    status.begin()
    status._ended.set()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6}\n{"step": 7}\n{"step": 8, "lo')
    printed = train(3, out, *flags, "--steps", "4", "--log-level", "debug", "--threads", "2")
    return out, printed


@needs_mpiexec
def test_the_story_of_a_run_is_told(story):
    out, printed = story
    expected = "started 0, saved 2, saved 3, sample 3, done 3, lost 7, started 3, resumed 3, warning 3, "
    expected += "warning 3, saved 4, sample 4, done 4"
    assert ", ".join(f"{event} {step}" for event, step in names(out)) == expected
    started, saved, warned = (
        [entry for entry in read(out) if entry["event"] == event] for event in ("started", "saved", "warning")
    )
    assert [entry["ranks"] for entry in started] == [2, 3]
    assert [sum(count for _, count in entry["hosts"]) for entry in started] == [2, 3]
    assert [entry["threads"] for entry in started] == [1, 2]
    assert all(entry["planned_bytes"] > 0 and entry["peak_flops"] > 0 for entry in started)
    assert {(entry["arch"], entry["device"], entry["precision"]) for entry in started} == {
        ("llama", "cpu", "fp32")
    }
    assert [entry["folder"] for entry in saved] == [f"step-{step:08d}" for step in (2, 3, 4)]
    for entry in saved:
        assert entry["bytes"] == sum(path.stat().st_size for path in (out / entry["folder"]).iterdir())
        assert re.fullmatch("[0-9a-f]{64}", entry["digest"])
        assert entry["seconds"] > 0
    last = {entry["event"]: entry for entry in read(out)}
    assert (last["resumed"]["folder"], last["resumed"]["from_ranks"]) == ("step-00000003", 2)
    assert "rank 0 on " in last["lost"]["reason"]
    assert ["threads 1, now 2" in entry["text"] for entry in warned] == [True, False]
    assert all(printed.count(f"[0/3] warning: {entry['text'][:30]}") == 1 for entry in warned)
    sample = last["sample"]
    assert (sample["folder"], sample["prompt"]) == ("step-00000004", "def ")
    assert sample["text"].startswith("def ")
    assert readable(sample["text"]) in printed
