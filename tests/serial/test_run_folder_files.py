"""Files of a run folder that somebody else has written, or that are no files: refused, or left out."""

import json
import os
import socket

import pytest
from report_runs import status, write_run

from zero_mpi.commands.report import command
from zero_mpi.commands.report.runs import MOST_HISTORY, read_run
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.events import Events
from zero_mpi.telemetry.metrics import METRICS, check, keep_until, last_step
from zero_mpi.telemetry.status import read_status
from zero_mpi.train.summary import Outcome


def put(path, kind):
    path.unlink(missing_ok=True)
    if kind in TEXTS:
        path.write_bytes(TEXTS[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind == "hole":
        path.touch()
        os.truncate(path, 8 << 30)
    else:
        path.symlink_to({"endless": "/dev/zero", "loop": path.name}[kind])


KINDS = ("folder", "pipe", "socket", "hole", "endless", "loop")
TEXTS = {
    "nested": b"[" * 100_000,
    "nested object": b'{"a":' * 100_000,
    "not UTF-8": b"\xff\xfe",
    "digits": b'{"step": ' + b"9" * 10_000 + b"}",
    "infinite": b'{"step": 1e999, "ranks": -1e999, "updated": NaN, "state": 7}',
    "long key": b"a." * 200_000 + b"a = 1",
}


def report(folder, *flags):
    return command.command(World(0, 1), [str(folder), *flags])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "loop"])
def test_the_report_and_a_run_refuse_what_is_no_file_of_records(tmp_path, kind):
    write_run(tmp_path, status=status())
    put(tmp_path / METRICS, kind)
    for action in (lambda: report(tmp_path), lambda: keep_until(tmp_path / METRICS, 3)):
        with pytest.raises(UsageError, match=r"expected a file of records|cannot be read") as refused:
            action()
        assert "\n" not in str(refused.value)
    assert last_step(tmp_path / METRICS) == 0
    if kind != "hole":
        with pytest.raises(UsageError, match=METRICS):
            check(tmp_path)


@pytest.mark.parametrize("kind", [*KINDS, *TEXTS])
def test_a_status_that_is_none_counts_as_nothing_and_is_replaced(tmp_path, kind):
    path = tmp_path / "status.json"
    put(path, kind)
    assert read_status(path).get("step") is None
    outcome = Outcome(tmp_path, World(0, 1), steps=5)
    outcome.open()
    outcome.end(0, "")
    if kind != "folder":
        assert json.loads(path.read_text())["state"] == "done"


@pytest.mark.parametrize("kind", ["pipe", "endless", "loop", "folder"])
def test_events_go_to_a_file_and_nowhere_else(tmp_path, kind, caplog):
    put(tmp_path / "events.jsonl", kind)
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
    found = read_run(tmp_path).events
    assert [event["step"] for event in found] == list(range(1000 - len(found), 1000))
    assert 0.9 * MOST_HISTORY < sum(len(event["text"]) for event in found) < MOST_HISTORY
