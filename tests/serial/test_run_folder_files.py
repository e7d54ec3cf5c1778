"""Files of a run folder that somebody else has written, or that are no files: refused, or left out."""

import json
import os
import socket

import pytest
from report_runs import record, status, write_run

from zero_mpi.commands.report import command
from zero_mpi.commands.report.command import facts
from zero_mpi.commands.report.runs import MOST_HISTORY, read_run
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import printable
from zero_mpi.launch.watchdog import RankReports, RankState
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.events import Events
from zero_mpi.telemetry.metrics import METRICS, check, keep_until, last_step
from zero_mpi.telemetry.status import Status, overwrite, read_status
from zero_mpi.train.summary import Outcome

HOSTILE = "a\nb\x1b]0;title\x07\u202e" + "x" * 50_000


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


@pytest.mark.parametrize("name", ["status.json", "config.toml", "events.jsonl"])
@pytest.mark.parametrize("kind", [*KINDS, *TEXTS])
def test_the_report_leaves_out_what_is_no_file_of_a_run(tmp_path, name, kind, capfd):
    write_run(tmp_path, status=status())
    put(tmp_path / name, kind)
    assert report(tmp_path) == 0
    assert "report.html" in capfd.readouterr().out


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


@pytest.mark.parametrize("kind", TEXTS)
def test_records_that_are_none_are_dropped_by_a_resume(tmp_path, kind):
    path = tmp_path / METRICS
    path.write_bytes(b'{"step": 1}\n' + TEXTS[kind] + b'\n{"step": 2}\n{"step": true}\n{"step": 2.0}\n')
    assert last_step(path) == 2
    keep_until(path, 5)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_bytes(TEXTS[kind])
    assert last_step(path) == 0


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


def test_what_a_killed_job_left_is_told_on_one_line(tmp_path):
    said = {"state": "running", "host": HOSTILE, "ranks": [[1]], "step": 10**400, "updated": "x"}
    (tmp_path / "status.json").write_text(json.dumps(said))
    before = Status(tmp_path, 0, 1, 5)
    before.begin()
    events = Events(tmp_path, 0)
    events.begin(0, before.before())
    before.end("done")
    reason = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])["reason"]
    assert printable(reason) == reason
    assert len(reason) < 400


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


@pytest.mark.parametrize("value", [10**400, {"a": 1}, None, 1e308])
@pytest.mark.parametrize("name", ["loss", "step_seconds", "memory_bytes", "tokens", "mfu", "skipped"])
def test_numbers_that_no_run_has_do_no_harm(tmp_path, name, value, capfd):
    rows = [record(1), record(2, **{name: value}), record(3, **{name: value})]
    write_run(tmp_path, rows, status=status(step=value, steps=value, ranks=value))
    assert report(tmp_path) == 0
    assert all(len(value) < 60 for value in facts(read_run(tmp_path)).values())
    assert max(map(len, capfd.readouterr().out.splitlines())) <= 2000
    write_run(tmp_path, rows[1:2], status=status())
    assert report(tmp_path) == 0


def test_texts_of_a_run_are_cut_and_escaped_on_the_page(tmp_path, capfd):
    names = ("started", "saved", "warning", "sample", "failed", "resumed", HOSTILE)
    about = dict.fromkeys(("time", "text", "reason", "folder", "prompt", "arch", "device"), HOSTILE)
    write_run(
        tmp_path,
        events=[{"event": name, "step": 1, **about} for name in names],
        status=status(HOSTILE, reason=HOSTILE),
        config=f'lr = "{"y" * 500_000}"\n"k{"z" * 300_000}\\u001b" = 1',
    )
    assert report(tmp_path) == 0
    page = (tmp_path / "report.html").read_text()
    assert printable(page, keep="\n\t").count("\\u") == page.count("\\u"), "nothing in it is to be escaped"
    library = page.partition('id="plotly">')[2].partition("</script>")[0]
    assert len(page) - len(library) < 300_000
    said = capfd.readouterr().out
    assert printable(said, keep="\n") == said
    assert max(map(len, said.splitlines())) <= 2000


def test_a_roll_call_takes_only_what_a_rank_signs(tmp_path):
    roll = RankReports(tmp_path, 0, "job")
    roll.sign(RankState("step 3", "", "", 1.0, "stack"))
    own = next((tmp_path / ".ranks").iterdir())
    for number, said in enumerate(['{"doing": 1}', "[" * 100_000, '{"seconds": 1e999}', own.read_text()], 1):
        own.with_name(f"{own.name[:-1]}{number}").write_text(said)
    put(own.with_name(f"{own.name[:-1]}7"), "pipe")
    assert sorted(roll.read()) == [0, 4]


def test_a_pipe_in_the_place_of_a_status_is_not_waited_for(tmp_path):
    """Where a new file has no room the old one is written over: a pipe without a reader would stop it."""
    os.mkfifo(tmp_path / "status.json")
    with pytest.raises(OSError, match="No such device"):
        overwrite(tmp_path / "status.json", b"{}")
