"""The report reads run folders and writes a page."""

import base64
import json
import re
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_runs import EVENTS, event, record, records, status, write_run

from zero_mpi.commands.report import command
from zero_mpi.commands.report.command import about, facts, page
from zero_mpi.commands.report.runs import MEMORY, Curves, Entry, read_run, read_runs
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World

NOW = datetime(2026, 11, 21, 18, 1, tzinfo=UTC)
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e{{ 7 * 7 }}"


def run_command(*arguments):
    return command.command(World(0, 1), [str(argument) for argument in arguments])


def page_of(*folders):
    return page(read_runs(folders), NOW)


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


class Tree(HTMLParser):
    """Parser that raises AssertionError unless all elements are closed correctly."""

    VOID = ("meta", "link", "br")

    def __init__(self, html):
        super().__init__()
        self.open, self.kinds = [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.kinds.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


# ------------------------------------------------------------------------------------------------ reading


def test_every_step_is_a_point_of_a_short_run(tmp_path):
    run = read_run(write_run(tmp_path))
    steps, values = run.curves.points("loss")
    assert steps.tolist() == list(range(1, 61))
    assert values.tolist() == [one["loss"] for one in records(60)]
    assert run.curves.points("val_loss")[0].tolist() == [10, 20, 30, 40, 50, 60]
    assert run.curves.points(MEMORY)[1][-1] == 5 << 20
    assert (run.step, run.curves.width) == (60, 1)


@pytest.mark.parametrize("steps", [8, 9, 100, 1000])
def test_columns_of_a_long_run_are_means(steps):
    curves = Curves((record(step, loss=float(step)) for step in range(1, steps + 1)), 8)
    places, means = curves.points("loss")
    width = curves.width
    assert len(places) <= 8 < 2 * max(8, steps) / width
    expected = [
        np.arange(first, min(first + width, steps + 1)).mean() for first in range(1, steps + 1, width)
    ]
    assert means.tolist() == expected
    assert places[-1] == steps


def test_what_is_not_finite_is_a_gap_and_what_is_absent_is_nothing(tmp_path):
    rows = [record(step, loss=None if step == 3 else 2.0) for step in range(1, 6)]
    rows += [{"step": 6}, '{"step": 7, "loss": NaN', "no record", '{"step": 8, "loss": "x", "lr": 1e999}']
    run = read_run(write_run(tmp_path, rows))
    steps, values = run.curves.points("loss")
    assert steps.tolist() == [1, 2, 3, 4, 5, 8]
    assert np.isnan(values).tolist() == [False, False, True, False, False, True]
    _, losses, *_ = data_of(page_of(tmp_path))["data"]
    assert losses["y"] == [2.0, 2.0, None, 2.0, 2.0, None]


@pytest.mark.parametrize(
    ("updated", "state"),
    [("2026-11-21T18:00:30Z", "running"), ("2026-11-21T17:00:00Z", "lost"), ("nonsense", "running")],
)
def test_a_silent_run_is_lost(tmp_path, updated, state):
    run = read_run(write_run(tmp_path, status=status("running", updated=updated)))
    run.now = NOW
    assert run.state == state


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_has_curves_figures_events_and_settings(tmp_path):
    folder = write_run(tmp_path / "one", status=status(reason="why"))
    html = page_of(folder)
    Tree(html)
    figures = facts(read_run(folder))
    assert figures["step"] == "60 of 60"
    assert figures["state"] == "done: why"
    assert (figures["ranks"], figures["parameters"]) == ("3", "1234567")
    for value in (*figures.values(), *map(about, map(Entry, EVENTS[:-2])), "lr", "0.001"):
        assert value in html.replace("&#39;", "'"), value
    figure = data_of(html)
    names = [trace["name"] for trace in figure["data"] if "name" in trace]
    assert [name.removeprefix("one: ") for name in names] == [
        "training", "validation", "gradient norm", "learning rate", "tokens/s", "step", "waiting on rank 0",
        "share of peak", "memory",
    ]  # fmt: skip
    axes = {trace["yaxis"].replace("y", "yaxis") for trace in figure["data"]}
    assert axes == {name for name in figure["layout"] if name.startswith("yaxis")}


def test_several_runs_share_panels_and_settings_that_differ_are_marked(tmp_path):
    one = write_run(tmp_path / "a" / "run")
    two = write_run(tmp_path / "b" / "run", config="steps = 60\nlr = 0.002\n")
    html = page_of(one, two, one)
    Tree(html)
    losses = [trace for trace in data_of(html)["data"] if trace.get("name", "").endswith("training")]
    assert [trace["name"] for trace in losses] == ["a/run: training", "b/run: training"]
    assert losses[0]["line"]["color"] != losses[1]["line"]["color"]
    assert '<tr class="differs"><th scope="row">lr</th>' in html
    assert '<tr><th scope="row">steps</th>' in html


def test_events_are_signs_over_the_curves(tmp_path):
    strip = data_of(page_of(write_run(tmp_path)))["data"][0]
    marks = sorted(zip(strip["x"], strip["text"], strip["marker"]["symbol"], strict=True))
    assert [(step, text.partition(" ")[0].rstrip(":"), sign) for step, text, sign in marks] == [
        (20, "resumed", "triangle-right"),
        (20, "saved", "diamond"),
        (20, "warning", "triangle-up"),
        (33, "lost", "x"),
    ]


def test_hostile_texts_stay_texts(tmp_path):
    folder = tmp_path / "<b>run"
    events = [
        event(name, 1, text=HOSTILE, reason=HOSTILE, folder=HOSTILE) for name in ("warning", "saved", HOSTILE)
    ]
    write_run(folder, events=events, status=status(reason=HOSTILE), config=f"arch = {json.dumps(HOSTILE)}\n")
    html = page_of(folder)
    tree = Tree(html)
    assert "49" not in re.sub(r'id="(data|plotly)">.*?</script>', "", html, flags=re.S).replace("2049", "")
    assert [tag for tag, _ in tree.kinds if tag == "script"] == ["script"] * 3
    assert not {"\x1b", "\u202e"} & {*html}
    assert all("<" not in text for trace in data_of(html)["data"] for text in [trace.get("name", "")])


def test_the_page_loads_nothing_and_runs_only_its_scripts(tmp_path):
    html = page_of(write_run(tmp_path))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http:" not in re.sub(r"<script.*?</script>", "", html, flags=re.S)
    script = re.search(r"<script>(.*?)</script>", html, re.S)[1]
    digest = __import__("hashlib").sha256(script.encode()).digest()
    assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy


def test_long_runs_make_small_pages(tmp_path):
    short, long = write_run(tmp_path / "a"), write_run(tmp_path / "b", list(records(9000)))
    assert len(page_of(long)) < len(page_of(short)) + 900_000


# ------------------------------------------------------------------------------------------------ the command


def test_default_places(tmp_path, monkeypatch, capfd):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    assert run_command(one) == 0
    assert run_command(one, two) == 0
    assert [path.name for path in one.iterdir() if "report" in path.name] == ["report.html"]
    assert "report.html" in capfd.readouterr().out
    assert (tmp_path / "report.html").stat().st_size < 4 << 20


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing"], "nothing: "),
        (["file"], "file: "),
        (["."], r"\.: "),
        (["run/step-00000006"], "run/step-00000006: .*run$"),
        (["run", "--out", "."], r"--out \.: "),
        (["run", "--out", "no/page.html"], "--out no/page.html: "),
        (["run", "--text"], "--text was removed"),
        ([], "RUN"),
    ],
)
def test_bad_usage(tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    checkpoint = write_run("run") / "step-00000006"
    checkpoint.mkdir()
    (checkpoint / "model.gguf").write_text("")
    with pytest.raises(UsageError, match=named):
        run_command(*arguments)
    assert not list(tmp_path.glob(".*partial"))


def test_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match=r"zero-mpi\[report\]"):
        run_command(write_run(tmp_path))
