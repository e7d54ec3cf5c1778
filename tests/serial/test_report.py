"""The report of a run: what it reads, what it leaves out, and that no text of a file can harm its page."""

import base64
import gzip
import hashlib
import json
import math
import re
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import jobs
import numpy as np
import pytest
from report_runs import EVENTS, STARTED, event, record, records, status, write_run

from zero_mpi.cli.text import elapsed, size
from zero_mpi.errors import UsageError
from zero_mpi.inspect.examine import examine
from zero_mpi.launch.world import World
from zero_mpi.report import command
from zero_mpi.report.charts import FORMS, charts_of, in_full, marks, points
from zero_mpi.report.columns import Metrics
from zero_mpi.report.figures import figures
from zero_mpi.report.page import ENVIRONMENT, page, visible
from zero_mpi.report.runs import Said, read_run, read_runs
from zero_mpi.report.terminal import lines_of, terminal
from zero_mpi.report.traces import outline

NOW = datetime(2026, 11, 21, 18, 0, 30, tzinfo=UTC)
VOID = {"meta", "link", "input"}
TOP = "<!doctype html>\n"


class Tree(HTMLParser):
    """Reads a page: every element is closed in its place, and what has been said is kept by element."""

    def __init__(self, html):
        super().__init__()
        self.open, self.ids, self.elements, self.texts = [], [], [], {}
        self.feed(html.removeprefix(TOP))
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag, **wanted):
        """The attributes of the elements of a kind."""
        return [given for kind, given in self.elements if kind == tag and wanted.items() <= given.items()]

    def said(self, tag):
        """All text directly inside elements of a kind."""
        return "".join(self.texts.get(tag, []))


def page_of(*folders):
    """The page of some runs."""
    return page(read_runs([Path(folder) for folder in folders]), NOW)


def payload_of(html):
    """The figures that the script of a page draws."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def traces_of(html, axis=None, *, mode=None):
    """The traces of a page's curves; of one chart or of one mode."""
    return [
        trace
        for trace in payload_of(html)["curves"]["traces"]
        if axis in (None, trace.get("yaxis", "y")) and mode in (None, trace["mode"])
    ]


def places_of(html, trace):
    """Where a trace's points lie, by axis."""
    return payload_of(html)["curves"]["places"][trace["meta"]["x"]]


def run_command(*arguments):
    """The command in this process."""
    return command.command(World(0, 1), [str(argument) for argument in arguments])


# ------------------------------------------------------------------------------------------ columns


def test_columns_hold_every_step_while_there_is_room():
    metrics = Metrics(limit=100)
    metrics.add(list(records(100)))
    assert metrics.width == 1
    assert metrics.used.tolist() == list(range(100))
    assert metrics.curves["loss"].mean.tolist() == [record(step)["loss"] for step in range(1, 101)]
    assert metrics.at["tokens"]["greatest"].tolist() == [2048.0 * step for step in range(1, 101)]


def test_columns_of_a_long_run_keep_mean_and_extremes():
    steps, limit, spike = 50_000, 100, 31_337
    values = np.random.default_rng(0).normal(3, 1, steps)
    values[spike] = 1e6
    metrics = Metrics(limit)
    for start in range(0, steps, 7000):  # pieces whose ends are not those of columns
        rows = [{"step": i + 1, "loss": values[i]} for i in range(start, min(steps, start + 7000))]
        metrics.add(rows)
    width = metrics.width
    assert width == 512  # the smallest power of two with at most `limit` columns
    columns = [values[at : at + width] for at in range(0, steps, width)]
    found = points(metrics, "loss")
    assert found.least.tolist() == [float(column.min()) for column in columns]
    assert found.greatest.tolist() == [float(column.max()) for column in columns]
    assert np.allclose(found.mean, [column.mean() for column in columns], rtol=1e-12)
    assert found.greatest[spike // width] == 1e6
    assert found.step.tolist() == [*(width * (place + 1) for place in range(len(columns) - 1)), steps]


def test_a_number_that_is_not_there_is_not_a_null():
    metrics = Metrics(limit=10)
    metrics.add(
        [{"step": 1, "loss": None}, {"step": 2}, {"step": 3, "loss": 2.5}, {"step": 4, "loss": math.inf}]
    )
    curve = metrics.curves["loss"]
    assert curve["count"].tolist()[:4] == [0, 0, 1, 0]
    assert curve["odd"].tolist()[:4] == [1, 0, 0, 0]
    assert points(metrics, "loss").odd.tolist() == [True, False]
    assert metrics.curves["val_loss"].is_empty
    assert "val_loss" not in metrics.last


def test_values_of_other_types_count_as_not_finite():
    metrics = Metrics(limit=10)
    strange = ["high", [1], {"a": 1}, 10**400]
    metrics.add([{"step": number + 1, "loss": value} for number, value in enumerate(strange)])
    metrics.add(
        [{"step": 0, "loss": 1.0}, {"step": "x", "loss": 1.0}, {"step": 1e300, "loss": 1.0}, {"loss": 1.0}]
    )
    assert metrics.records == 4
    assert metrics.curves["loss"]["odd"].sum() == 4


def test_damaged_lines_are_left_out(tmp_path):
    torn = json.dumps(record(4))[:40]
    rows = [
        record(1),
        "",
        "not JSON",
        "[" * 100_000,
        "7",
        record(2),
        '{"step": 3, "loss": NaN}',
        "\x00",
        torn,
    ]
    run = read_run(write_run(tmp_path, rows))
    assert run.step == 3
    assert run.metrics.records == 3
    assert run.metrics.curves["loss"]["odd"].sum() == 1
    assert math.isnan(run.metrics.last["loss"])


def test_memory_is_a_span_over_ranks(tmp_path):
    rows = [
        record(1, memory_bytes=[5, 3, 9]),
        record(2),
        record(3, memory_bytes=[4, 4]),
        record(4, memory_bytes="no"),
    ]
    found = points(read_run(write_run(tmp_path, rows)).metrics, "memory_bytes")
    assert (found.step.tolist(), found.least.tolist(), found.greatest.tolist()) == ([1, 3], [3, 4], [9, 4])
    assert found.mean.tolist() == [9, 4]


# ------------------------------------------------------------------------------------------- the page


def test_page_is_well_formed_and_names_everything(tmp_path):
    html = page_of(write_run(tmp_path / "one", status=status()))
    tree = Tree(html)
    figures = payload_of(html)
    assert sorted(given["id"] for given in tree.all("div", **{"class": "plot"})) == [
        "curves-plot",
        "memory-plot",
    ]
    titles = [each["text"].split("</b>")[0] for each in figures["curves"]["layout"]["annotations"]]
    assert titles == [
        f"<b>{title}"
        for title in (
            "Loss", "Learning rate", "Gradient norm", "Throughput", "Share of peak", "Memory of a rank",
            "Bytes moved", "Exposed waits",
        )
    ]  # fmt: skip
    lines = [trace for trace in traces_of(html) if trace["mode"].startswith("lines")]
    assert len(lines) == 9
    assert {trace["yaxis"] for trace in lines} == {f"y{number}" for number in range(2, 10)}
    assert "step 33: lost: a job of 2 rank(s) was killed" in " ".join(
        text.replace("<br>", " ") for trace in traces_of(html, "y") for text in trace["text"]
    )
    for wanted in ("1.235M", "<h2>Samples", "NumPy changed", "buffers planned: 4.0 MiB", "5.0 MiB"):
        assert wanted in html
    (bars,) = figures["memory"]["traces"]
    assert (bars["x"], bars["y"]) == ([0, 1, 2], [3, 5, 4])


def test_page_loads_nothing_and_runs_only_its_own_script_and_plotly(tmp_path):
    html = page_of(write_run(tmp_path, status=status()))
    tree = Tree(html)
    policy = tree.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy.startswith("default-src 'none'; ")
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split("; ")}
    assert rules["style-src"] == ["'unsafe-inline'"], "styles of Plotly, which can fetch nothing"
    assert rules["img-src"] == ["data:"]
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    style, script = (
        re.search(r"<style>(.*?)</style>", html, re.S)[1],
        html.split("<script>")[1].split("</script>")[0],
    )
    packed = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', html, re.S)[1]
    library = gzip.decompress(base64.b64decode(packed)).decode()
    assert "plotly.js v" in library[:100]
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, library)]
    assert rules["script-src"] == [f"'sha256-{each}'" for each in hashes], "these two and no other"
    for _, given in tree.elements:
        assert not [name for name in given if name in ("src", "style", "srcset") or name.startswith("on")]
        assert all(not value.startswith("http") for name, value in given.items() if name == "href")
    assert set(re.findall(r"https?://[\w./]*", html)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "@import" not in style
    assert "url(" not in style


def test_page_without_its_library(tmp_path, monkeypatch):
    folder = write_run(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match=r"pip install 'zero-mpi\[report\]', or use --text") as told:
        run_command(folder)
    assert "\n" not in str(told.value)
    assert not (folder / "report.html").exists()
    assert run_command(folder, "--text") == 0


HOSTILE = "</script><script>x=1</script><img src=x onerror=alert(1)>'\"&<!--"


def test_hostile_texts_stay_texts(tmp_path):
    odd = f"{HOSTILE}\x00\x1b[31m\u202e\ud800"
    folder = tmp_path / 'a"><b>'
    events = [
        event("sample", 1, prompt=odd, text=odd),
        event("failed", 1, reason=odd),
        event("warning", 1, text=odd),
        event(HOSTILE, 1),
    ]
    config = f"steps = 60\nprompt = {json.dumps(HOSTILE)}\n{json.dumps(HOSTILE)} = 1\n"
    write_run(folder, events=events, status=status(HOSTILE, reason=odd, host=odd), config=config)
    html = page_of(folder, write_run(tmp_path / "plain"))
    html.encode()  # no halves of characters
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", html)
    tree = Tree(html)
    scripts = [given.get("type") for given in tree.all("script")]
    assert scripts == ["application/json", "text/plain", None]
    assert not tree.all("img")
    assert visible(odd) in tree.said("pre") + tree.said("b")
    assert HOSTILE in tree.said("code")
    names = {trace["name"] for trace in traces_of(html, "y2") if trace["showlegend"]}
    assert 'a"&gt;&lt;b&gt; training' in names, "Plotly reads HTML"
    drawn = json.dumps(payload_of(html))
    assert set(re.findall("<[^>]*>?", drawn)) <= {"<b>", "</b>", "<br>", "<extra>", "</extra>"}


def test_controls_are_made_visible():
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible("\x00\x1b\x7f\u202e\u2066\ud800") == r"\x00\x1b\x7f\u202e\u2066\ud800"
    assert visible("naïve 日本 \U0001f600") == "naïve 日本 \U0001f600"
    for wanted in (
        "{{ text }}",
        "{{ text|visible(99) }}",
        "{{ [text]|join }}",
        "{% if text %}{{ text }}{% endif %}",
    ):
        found = ENVIRONMENT.from_string(wanted).render(text="<a href='x'>&\"\x1b")
        assert found == "&lt;a href=&#39;x&#39;&gt;&amp;&#34;\\x1b"


def test_nulls_are_gaps_with_a_mark(tmp_path):
    rows = [record(step, loss=None if step in (30, 31) else 2.0 + step % 2) for step in range(1, 61)]
    html = page_of(write_run(tmp_path, rows, events=None))
    line, crosses = traces_of(html, "y2")
    assert [place for place, value in enumerate(line["y"]) if value is None] == [29, 30]
    assert crosses["hovertemplate"] == "not finite"
    assert crosses["marker"]["symbol"] == "x-thin"
    assert places_of(html, crosses)["step"] == [30, 31]
    assert crosses["y"] == pytest.approx([3 - 1 / 3, 2 + 1 / 3], rel=1e-4), "in the gap, between 3 and 2"


def test_the_band_of_a_curve_has_its_gaps():
    metrics = Metrics(limit=4)
    metrics.add([{"step": step, "loss": None if step in (3, 4) else float(step)} for step in range(1, 9)])
    at, edge = outline(points(metrics, "loss"))
    assert at.tolist() == [0, 0, -1, 2, 3, 3, 2, -1]
    assert edge.tolist()[:2] == [2, 1]
    assert edge.tolist()[3:7] == [6, 8, 7, 5]
    assert np.isnan(edge[[2, 7]]).all()


def test_what_is_not_known_is_left_out(tmp_path):
    old = [
        {key: record(step)[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")}
        for step in range(1, 9)
    ]
    html = page_of(write_run(tmp_path, old, events=None, config=None))
    lines = [trace for trace in traces_of(html) if "lines" in trace["mode"]]
    assert [trace["name"] for trace in lines] == ["training", "learning rate", "gradient norm"]
    assert places_of(html, lines[0])["seconds"] == []
    assert places_of(html, lines[0])["tokens"] == [2048 * step for step in range(1, 9)]
    for section in ("History", "Samples", "Configuration", "Checkpoints", "Memory", "Share of peak"):
        assert f"<h2>{section}" not in html
        assert f"<dt>{section}" not in html
    assert "state unknown" in html


def test_a_run_that_failed_before_its_first_step(tmp_path):
    write_run(
        tmp_path,
        [],
        events=[event("failed", 0, reason="no room")],
        status=status("failed", reason="no room", step=0),
    )
    html = page_of(tmp_path)
    Tree(html)
    assert "failed: no room" in html
    assert payload_of(html) == {}
    assert "plotly.js" not in html
    assert "Last values" not in html


def test_long_runs_make_small_pages(tmp_path):
    rows = (
        json.dumps({"step": i, "loss": 2 + (i * 7919 % 1000) / 1000, "grad_norm": 1.0})
        for i in range(1, 70_001)
    )
    run = read_run(write_run(tmp_path, list(rows), events=None))
    run.name = "long"
    html = page([run], NOW)
    assert run.metrics.width == 64
    assert len(html) < 2_500_000
    assert len(json.dumps(payload_of(html))) < 300_000
    assert "mean of up to 64 steps" in html
    band, line = traces_of(html, "y2")
    assert len(line["y"]) == -(-70_000 // 64)
    least, greatest = zip(*line["customdata"], strict=True)
    assert (min(least), max(greatest)) == (2.0, 2.999)
    assert (min(filter(None, band["y"])), max(filter(None, band["y"]))) == (2.0, 2.999)
    assert band["fill"] == "toself"
    assert len(places_of(html, band)["step"]) == len(band["y"])
    (flat,) = traces_of(html, "y3")
    assert set(flat["y"]) == {1}


def test_several_runs_share_charts_and_mark_what_differs(tmp_path):
    one = write_run(tmp_path / "a" / "run", config="steps = 60\nlr = 0.001\n")
    two = write_run(tmp_path / "b" / "run", list(records(30)), config="steps = 60\nlr = 0.002\ndim = 64\n")
    html = page_of(one, two, one)
    Tree(html)
    shown = [(trace["name"], trace["legendgroup"]) for trace in traces_of(html, "y2") if trace["showlegend"]]
    assert shown == [
        ("a/run training", "run 0"), ("a/run validation", "run 0"),
        ("b/run training", "run 1"), ("b/run validation", "run 1"),
    ]  # fmt: skip
    differing = re.findall(r'<tr class="differs"><th scope="row"><code>(\w+)</code>', html)
    assert differing == ["dim", "lr"]


def test_one_run_marks_what_is_not_the_default(tmp_path):
    html = page_of(write_run(tmp_path, config="steps = 440\nlr = 0.5\nfreeze = []\n"))
    assert re.findall(r'<tr class="differs"><th scope="row"><code>(\w+)</code>', html) == ["lr"]


# ------------------------------------------------------------------------------------ state and marks


def test_marks_are_of_events(tmp_path):
    found = {(mark.step, mark.kind) for mark in marks(read_run(write_run(tmp_path)))}
    assert found == {(20, "saved"), (33, "fault"), (20, "resumed"), (20, "warning")}


def test_very_many_marks_are_thinned(tmp_path):
    events = [event("saved", step, folder=f"step-{step:08d}") for step in range(1, 5001)]
    events += [event("failed", step, reason="x") for step in range(1, 1001)]
    found = marks(read_run(write_run(tmp_path, events=events)))
    assert sum(mark.kind == "saved" for mark in found) <= 300
    assert [mark.step for mark in found if mark.kind == "fault"] == list(range(701, 1001))


@pytest.mark.parametrize(
    ("updated", "state"),
    [
        ("2026-11-21T17:59:59+00:00", "running"),
        ("2026-11-21T17:00:00+00:00", "lost"),
        ("soon", "running"),
        (7, "running"),
    ],
)
def test_a_silent_run_is_lost(tmp_path, updated, state):
    run = read_run(write_run(tmp_path, events=None, status=status("running", updated=updated)))
    run.now = NOW
    assert run.state == state
    assert [mark.kind for mark in marks(run)] == ["fault"] * (state == "lost")


def test_old_runs_mark_their_end_by_the_status(tmp_path):
    run = read_run(write_run(tmp_path, events=None, status=status("failed", reason="rank 3: disk full")))
    assert [(mark.step, mark.kind, mark.about) for mark in marks(run)] == [
        (60, "fault", "failed rank 3: disk full")
    ]


def test_figures(tmp_path):
    run = read_run(write_run(tmp_path, status=status()))
    found = {one.name: (one.value, one.note) for one in figures(run)}
    assert found["Step"] == ("60", "of 60")
    assert found["Tokens"] == ("122.9k", "seen so far")
    assert found["Training time"] == ("15 s", "steps alone")
    assert found["Loss"] == ("1.893", "best 1.893")
    assert found["Tokens a second"] == ("8,192", "median of the last 60 steps")
    assert found["Share of peak"][0] == "40 %"
    assert found["Exposed waits"][0] == "12.5 %"
    assert found["Ranks"] == ("3", "1 host, 1 thread each, cpu, fp32, full-shard, shared")
    assert found["Memory of a rank"] == ("5.0 MiB", "buffers planned: 4.0 MiB"), "that of the latest job"


@pytest.mark.parametrize("about", [{"step": 60}, {"ranks": 7}])
def test_memory_of_an_earlier_job_is_not_shown_beside_the_ranks_of_the_latest(tmp_path, about):
    write_run(tmp_path, events=[*EVENTS, {**STARTED, **about}], status=status())
    found = {one.name: (one.value, one.note) for one in figures(read_run(tmp_path))}
    assert found["Ranks"][0] == str(about.get("ranks", 2))
    assert found["Memory of a rank"] == ("4.0 MiB", "planned for buffers")
    assert "Memory by rank" not in Tree(page_of(tmp_path)).said("h2")


@pytest.mark.parametrize(
    "events", [[{"event": 3}, "[]", "", '{"event": "saved"'], [event("started", "x", ranks=-1, hosts=3)]]
)
def test_odd_events_do_no_harm(tmp_path, events):
    Tree(
        page_of(
            write_run(
                tmp_path, events=events, status={"state": 3, "steps": "x", "updated": None}, config="= 3"
            )
        )
    )


# -------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("form", "value", "shown"),
    [
        ("plain", 1.23456, "1.235"), ("plain", 0.0, "0"), ("plain", 4e-5, "4e-5"), ("plain", 1.5e7, "1.5e7"),
        ("plain", 123456.0, "123,456"), ("count", 440.0, "440"), ("count", 8192.0, "8,192"),
        ("count", 12345.0, "12.35k"), ("count", 1e7, "10M"), ("bytes", 512.0, "512 B"),
        ("bytes", 1536.0, "1.5 KiB"), ("percent", 0.4567, "45.7 %"),
    ],
)  # fmt: skip
def test_numbers_for_people(form, value, shown):
    assert FORMS[form](value) == shown


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3, 7), (0.001, 0.0042), (1, 440), (5e6, 5.1e6), (0, 1e15)]
)
def test_lines_of_a_terminal_are_round_and_hold_the_range(low, high):
    for most in (4, 10, 16):
        bottom, top, lines = lines_of(low, high, most, "plain")
        step = (top - bottom) / lines
        assert bottom <= low + step * 1e-6
        assert top >= high - step * 1e-6
        assert most / 5 <= lines <= most
        assert f"{step:.6e}"[0] in "1259"  # 9: what is left of 10 after a subtraction


def test_lines_of_bytes_are_round_in_their_unit():
    bottom, top, lines = lines_of(0.0, 5.3 * 2**20, 10, "bytes")
    assert (bottom, (top - bottom) / lines % 2**19) == (0.0, 0.0)


# ----------------------------------------------------------------------------------------- a real run


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A short run that was made longer on another number of ranks."""
    out = tmp_path_factory.mktemp("report") / "run"
    small = ["--layers", "1", "--dim", "16", "--heads", "2", "--context", "16", "--batch-size", "2"]
    small += [
        "--micro-batch",
        "1",
        "--eval-windows",
        "4",
        "--sample",
        "8",
        "--log-every",
        "2",
        "--out",
        str(out),
    ]
    for ranks, steps in ((2, 4), (1, 6)):
        arguments = ["-m", "zero_mpi.train", *small, "--steps", str(steps)]
        code, printed, errors = jobs.run_job(ranks, arguments)
        assert code == 0, printed + errors
    return out


def test_a_real_run_has_every_part(real):
    run = read_runs([real])[0]
    assert run.state == "done"
    assert (run.step, run.steps) == (6, 6)
    assert [chart.id for chart in charts_of([run])] == [
        "loss", "lr", "grad_norm", "speed", "mfu", "memory", "bytes", "waits",
    ]  # fmt: skip
    assert [mark.step for mark in marks(run) if mark.kind == "resumed"] == [4]
    newest = run.checkpoints[-1]
    assert newest.is_latest
    assert newest.digest == examine(real / "latest")["state_digest"]
    saved = [one for one in run.events if one["event"] == "saved"]
    assert [one["digest"] for one in saved] == [one.digest for one in run.checkpoints]
    html = page([run], NOW)
    Tree(html)
    for heading in ("Last values", "Checkpoints", "Samples", "History", "Configuration"):
        assert f"<h2>{heading}</h2>" in html
    assert newest.digest in html


def test_checkpoints_that_cannot_be_read_say_why(real, tmp_path):
    for name in ("metrics.jsonl", "config.toml"):
        (tmp_path / name).write_bytes((real / name).read_bytes())
    for step, cut in ((4, 100), (6, None)):
        source, folder = real / f"step-{step:08d}", tmp_path / f"step-{step:08d}"
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes()[:cut])
    (tmp_path / "step-00000006" / "optimizer.gguf").unlink()
    (tmp_path / "latest").symlink_to("step-00000006")
    (tmp_path / "best").symlink_to("step-00000004")
    found = read_run(tmp_path).checkpoints
    assert "model.gguf" in found[0].problem
    assert "optimizer.gguf" in found[1].problem
    assert [one.is_latest for one in found] == [False, True]
    assert [one.is_best for one in found] == [True, False]
    Tree(page_of(tmp_path))


def test_equal_checkpoints_of_two_runs_are_named(real, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("metrics.jsonl", "step-00000006"):
        (other / name).symlink_to(real / name)
    assert "same bits as" not in page_of(real)
    (other / "step-00000006").unlink()
    (other / "step-00000006").mkdir()
    for file in (real / "step-00000006").iterdir():
        (other / "step-00000006" / file.name).write_bytes(file.read_bytes())
    assert page_of(real, other).count("same bits as") == 2


def test_report_starts_no_mpi(real, tmp_path):
    out = tmp_path / "page.html"
    code = f"import atexit, sys; sys.argv = ['report', {str(real)!r}, '--out', {str(out)!r}]\n"
    code += "names = ('mpi4py.MPI', 'plotille', 'plotly.graph_objects', 'numba')\n"
    code += "heavy = lambda: [name for name in names if name in sys.modules]\n"
    code += "atexit.register(lambda: print(heavy()))\n"
    code += "from zero_mpi.report.command import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        f"wrote {out} ({size(out.stat().st_size)}): open it in a browser",
        "[]",
    ]
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------ the command


def test_default_places(tmp_path, monkeypatch, capfd):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    assert run_command(one) == 0
    assert run_command(one, two) == 0
    assert sorted(path.name for path in one.iterdir() if "report" in path.name) == ["report.html"]
    assert (tmp_path / "report.html").read_text().startswith(TOP)
    assert "wrote report.html" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "nothing: expected the folder of a run .* found nothing there"),
        (["file"], "file: expected the folder of a run .* found a file"),
        (["."], "found neither: give the path of a run"),
        (["run/step-00000006"], "found a checkpoint: give the folder around it, .*run"),
        (["run", "--out", "."], "--out .: cannot be written: it is a folder, expected the name of a file"),
        (
            ["run", "--out", "no/page.html"],
            "--out no/page.html: cannot be written: No such file or directory: no",
        ),
        (["run", "--out", "x.html", "--text"], "--out x.html: --text writes no page"),
        ([], "RUN"),
    ],
)
def test_bad_usage(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    checkpoint = write_run("run") / "step-00000006"
    checkpoint.mkdir()
    (checkpoint / "model.gguf").write_text("")
    with pytest.raises(UsageError, match=said):
        run_command(*arguments)
    assert not list(tmp_path.glob(".*partial"))


# -------------------------------------------------------------------------------------- the terminal


def test_text_has_figures_and_curves_within_the_width(tmp_path, monkeypatch):
    runs = read_runs(
        [write_run(tmp_path / "one", status=status()), write_run(tmp_path / "two", list(records(30)))]
    )
    for columns in (60, 100, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = list(terminal(runs))
        assert max(map(len, lines)) <= min(columns, 160)
        whole = "\n".join(lines)
        assert "\x1b" not in whole  # nobody watches: no colours
        for wanted in (
            "one: done",
            "Loss, nats a token",
            "Learning rate",
            "* one training",
            "+ two validation",
        ):
            assert wanted in whole
        assert len([letter for letter in whole if "\u2800" < letter <= "\u28ff"]) > 100
        assert re.search(r"step 33: lost: a job of 2 rank", whole)


def test_text_is_coloured_where_a_person_watches(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[38;5;33m" in "\n".join(terminal(read_runs([write_run(tmp_path)])))


def test_text_of_constant_and_of_broken_curves(tmp_path):
    rows = [record(step, loss=None, grad_norm=None if step == 3 else 2.0, lr=0.0) for step in range(1, 6)]
    whole = "\n".join(terminal(read_runs([write_run(tmp_path, rows, events=None)])))
    assert "Gradient norm" in whole
    assert "not finite at 1 point" in whole
    assert "Loss, nats" not in whole


def test_text_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotille", None)
    with pytest.raises(UsageError, match=r"pip install 'zero-mpi\[report\]'"):
        run_command(write_run(tmp_path), "--text")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.25, "0.25 s"), (59.6, "1 min"), (7500.0, "2 h 5 min"), (90000.0, "1 d 1 h")],
)
def test_durations_for_people(seconds, shown):
    assert elapsed(seconds) == shown


def test_duration_never_says_sixty_seconds():
    assert {elapsed(value) for value in (59.4, 60.0, 61.0)} == {"59 s", "1 min", "1 min 1 s"}


def test_events_of_the_contract_are_known():
    """Every event of a run has words of its own in the page's history."""
    assert [in_full(Said(one)) for one in EVENTS] == [
        "started on 2 ranks, full-shard, shared, 2 MiB, cpu, 0.1.0",
        "saved step-00000020, 1.0 MiB in 0.5 s",
        "lost: a job of 2 rank(s) was killed",
        "started on 3 ranks, full-shard, shared, 2 MiB, cpu, 0.1.0",
        "resumed from step-00000020 of 2 ranks",
        "warning: NumPy changed",
        "sample of step-00000060",
        "done",
    ]
