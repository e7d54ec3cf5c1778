"""The table of a timeline adds up to the steps; flags select the steps, and a trace changes no bit."""

import gzip
import json
import logging
import random
import re
import sys

import pytest
from jobs import run_command
from test_command_bits import SIZES, assert_same_run, needs_mpiexec, train, write_text
from timelines import check_events, event, lasting, save

from zero_mpi import SerialComm
from zero_mpi.commands.trace import CLAIMS, COLUMNS, read, shares
from zero_mpi.errors import UsageError
from zero_mpi.telemetry import spans
from zero_mpi.train.timeline import Timeline, Tracer

STEP = event(0, "steps", "step", 0, 100)


def shares_of(path, *events):
    return shares(read(save(path / "trace.json", list(events))))


def columns(share):
    return {name: lasted for name, lasted in share.columns.items() if lasted}


# --------------------------------------------------------------------------------------------- the table

CASES = [  # events of a step of length 100, and the columns
    (
        [
            event(0, "data", "read", 0, 5),
            event(0, "between stages", "before", 5, 30, unit="blk.0"),
            event(0, "waits", "allgather", 10, 20, unit="blk.0"),
            event(0, "compute", "forward", 30, 60, unit="blk.0"),
            event(0, "optimizer", "norm", 60, 80),
            event(0, "waits", "allreduce", 65, 75),
            event(0, "optimizer", "update", 80, 90),
            event(0, "gathers", "allgather", 6, 40, bytes=1000),  # 24 of 34 units of time are hidden
        ],
        {"data": 5, "moving": 15, "exposed": 20, "compute": 30, "optimizer": 20, "other": 10},
    ),
    (  # a wait of the host while the device computes is hidden
        [
            event(0, "compute", "backward", 0, 50),
            event(0, "waits", "allgather", 20, 70),
            event(0, "stalls", "allgather", 70, 80),
        ],
        {"compute": 50, "exposed": 30, "other": 20},
    ),
    (  # evaluations and checkpoints count in full
        [
            event(0, "steps", "evaluation", 0, 30),
            event(0, "compute", "forward", 5, 25),
            event(0, "checkpoint", "save", 40, 60),
            event(0, "waits", "gather", 45, 55),
            event(0, "checkpoint behind training", "save", 60, 100),
        ],
        {"evaluation": 30, "checkpoint": 20, "other": 50},
    ),
    (  # a wait without a unit gets the name of the stage that needs it
        [
            event(0, "between stages", "before", 0, 50, unit="blk.7"),
            event(0, "waits", "updated parameters", 10, 30),
        ],
        {"moving": 30, "exposed": 20, "other": 50},
    ),
]


@pytest.mark.parametrize(("events", "expected"), CASES)
def test_each_moment_is_in_one_column(events, expected, tmp_path):
    (share,) = shares_of(tmp_path, STEP, *events)
    assert (columns(share), share.steps) == (expected, {1: 100})
    has_transfer = events[-1]["cat"] == "gathers"
    assert (share.hidden, share.sent) == ((34 - 10, 1000) if has_transfer else (0, 0))


@pytest.mark.parametrize("seed", range(5))
def test_the_columns_add_up_to_the_steps_whatever_is_recorded(tmp_path, seed):
    draw = random.Random(seed)
    events = [event(0, "steps", "step", 100 * (n - 1), 100 * n, step=n) for n in (1, 2, 3)]
    for _ in range(60):
        _, track, kinds = draw.choice(CLAIMS)
        begun = draw.uniform(-20, 310)
        ended = begun + draw.choice([0, draw.uniform(0, 60)])
        events.append(event(0, track, draw.choice(kinds or ("any",)), begun, ended, step=draw.randint(1, 3)))
    (share,) = shares_of(tmp_path, *events)
    assert sum(share.columns.values()) == pytest.approx(300, abs=1e-9)
    assert share.steps == {1: 100, 2: 100, 3: 100}
    assert all(lasted >= 0 for lasted in share.columns.values())
    assert len(columns(share)) > 4


# ----------------------------------------------------------------------------------------------- the flags


def run_of(tracer, first, last):
    """Trace a run from step `first` to `last`."""
    for step in range(first, last + 1):
        tracer.reach(step)
    tracer.end(last)


@pytest.mark.parametrize(
    ("steps", "done", "last", "found", "warned"),
    [
        ((3, 5), 0, 6, [3, 4], ""),
        ((3, 5), 0, 4, [3, 4], ""),
        ((3, 6), 0, 4, [3, 4], "step 5"),
        ((3, 6), 3, 9, [4, 5], ""),
        ((3, 6), 0, 2, None, "3:6"),
        ((3, 6), 7, 9, None, "3:6"),
        (None, 0, 9, [3, 4, 5], ""),
        (None, 7, 20, [10, 11, 12], ""),
    ],
)
def test_the_steps_that_are_asked_for(tmp_path, caplog, steps, done, last, found, warned):
    path = tmp_path / "trace.json"
    with caplog.at_level(logging.INFO, "zero_mpi"):
        run_of(Tracer(SerialComm(), str(path), steps, done), done + 1, last)
    assert spans.active is None
    assert (read(path).steps if found else path.exists()) == (found or False)
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert (len(messages), warned in "".join(messages)) == (bool(warned), True)
    assert (f"steps {found[0]} to {found[-1]}: {path}" if found else "") in caplog.text


def test_a_full_disk_costs_the_time_line_and_not_the_run(tmp_path, caplog, monkeypatch):
    tracer = Tracer(SerialComm(), str(tmp_path / "trace.json"), (1, 2), 0)
    monkeypatch.setattr(Timeline, "write", lambda self: "the timeline X cannot be written: No space left")
    run_of(tracer, 1, 2)
    assert [record.message for record in caplog.records] == [
        "the timeline X cannot be written: No space left"
    ]


def test_a_bad_place_is_refused_before_the_run(tmp_path):
    for place in (tmp_path, tmp_path / "no" / "trace.json"):
        with pytest.raises(UsageError, match=rf"--trace {place}: "):
            Tracer(SerialComm(), str(place), None, 0)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- the command

FLAGS = ["--steps", "5", "--sample", "0", "--batch-size", "6", "--eval-every", "2", "--eval-windows", "4"]
FLAGS += ["--save-every", "2", "--async-save"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    data = ["--data", *write_text(folder)]
    train(2, folder / "plain", *SIZES, *FLAGS, *data)
    flags = ["--trace", str(folder / "trace.json.gz"), "--trace-steps", "2:5"]
    return folder, train(2, folder / "traced", *SIZES, *FLAGS, *data, *flags)


@needs_mpiexec
def test_the_command_writes_a_time_line_and_the_same_bits(traced):
    folder, printed = traced
    assert_same_run(folder / "traced", folder / "plain")
    assert f"timeline of steps 2 to 4: {folder / 'trace.json.gz'} (" in printed
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    check_events(events)
    intervals = lasting(events)
    assert {each["pid"] for each in intervals} == {1, 2}
    expected = {"steps", "compute", "optimizer", "between stages", "waits", "data", "checkpoint"}
    assert {each["cat"] for each in intervals} >= expected | {"checkpoint behind training", "reductions"}
    for rank in (0, 1):
        local = [each for each in intervals if each["pid"] == rank + 1]
        kinds = [each["args"]["kind"] for each in local if each["cat"] == "steps"]
        assert (kinds.count("step"), kinds.count("evaluation")) == (3, 2)
        assert sum(each["cat"] == "checkpoint behind training" for each in local) == 2
    own_steps = [each for each in intervals if each["args"]["kind"] == "step" and each["pid"] == 1]
    record = [json.loads(line) for line in (folder / "traced" / "metrics.jsonl").read_text().splitlines()]
    for each in own_steps:
        assert each["dur"] >= 1e6 * record[each["args"]["step"] - 1]["step_seconds"] > 0


@needs_mpiexec
def test_the_table_of_a_real_run(traced):
    folder, _ = traced
    recorded = read(folder / "trace.json.gz")
    for share in shares(recorded):
        assert sum(share.columns.values()) == pytest.approx(sum(share.steps.values()), rel=1e-9)
        assert {name for name, lasted in share.columns.items() if lasted} == set(COLUMNS)
    program = [sys.executable, "-m", "zero_mpi", "trace", folder / "trace.json.gz"]
    status, printed, errors = run_command(program, timeout=30)
    assert (status, errors) == (0, "")
    assert "trace.json.gz: steps 2 to 4 of 2 ranks" in printed
    assert len(re.findall(r"(?m)^ +[01] +[0-9.]+ +[0-9.]+ +[0-9]+%", printed)) == 2
