"""Tests of run events whose file is not a regular file, or is very large."""

import json
import os

import pytest
from report_runs import write_run

from zero_mpi.commands.report.runs import MOST_HISTORY, read_run
from zero_mpi.telemetry import log
from zero_mpi.telemetry.events import Events

NO_FILES = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_events_go_to_a_file_and_nowhere_else(tmp_path, kind, caplog):
    NO_FILES[kind](tmp_path / "events.jsonl")
    events = Events(tmp_path, 0)
    for _ in range(2000):
        events.note("saved", text="x" * 100)
    log.logger.handlers[:] = [one for one in log.logger.handlers if one is not events]
    assert [line for line in caplog.messages if "cannot be written" in line] == [caplog.messages[0]]


def test_the_newest_events_are_kept_where_there_are_very_many(tmp_path):
    write_run(tmp_path, events=None)
    with (tmp_path / "events.jsonl").open("w") as file:
        for step in range(1000):
            file.write(json.dumps({"event": "warning", "step": step, "text": "x" * 20_000}) + "\n")
    events = read_run(tmp_path).events
    assert [event["step"] for event in events] == list(range(1000 - len(events), 1000))
    assert 0.9 * MOST_HISTORY < sum(len(event["text"]) for event in events) < MOST_HISTORY
