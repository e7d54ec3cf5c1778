"""benchmarks/gpu_check.py reports in one line that there is no GPU, and runs on the simulated CuPy."""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from jobs import run_command, until
from test_command_bits import needs_mpiexec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_check  # noqa: E402
import gpu_jobs  # noqa: E402
import gpu_setup  # noqa: E402
from gpu_jobs import Report, Section  # noqa: E402

CHECK = [sys.executable, BENCHMARKS / "gpu_check.py"]


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++, with which the simulated CuPy compiles kernels"
)


def has_gpu():
    try:
        return gpu_setup.cuda_version() > 0
    except gpu_setup.NotReady:
        return False


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU, so the check would start")
def test_without_a_gpu_it_is_one_line(tmp_path):
    status, printed, errors = run_command([*CHECK, "--out", tmp_path / "report"], timeout=20)
    assert (status, printed) == (2, "")
    assert re.fullmatch(r"gpu_check: no GPU: .*; --pretend .*\n", errors)


@needs_mpiexec
@needs_compiler
@pytest.mark.timeout_seconds(240)
def test_the_parts_that_need_no_gpu(tmp_path):
    quick = "tests/gpu/test_offload.py::test_a_host_without_pinned_memory_is_one_line"
    flags = ["--pretend", "--out", tmp_path / "report", "--tests", quick, "--ranks", "1", "2"]
    status, printed, errors = run_command([*CHECK, *flags], timeout=200)
    assert (status, errors) == (0, ""), printed
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    sections = {section["name"]: section for section in report["sections"]}
    assert list(sections) == ["first", "ranks", "tests", "losses"]
    assert {section["state"] for section in sections.values()} == {"passed"}
    labels = {verdict["what"] for section in sections.values() for verdict in section["verdicts"]}
    assert labels >= {
        "a product on it", "memory of activations", "tests/gpu on 1 rank", "losses of tiny-gpt2:fp32",
        "losses of tiny-llama:bf16", "moments offloaded, one rank", "2 ranks, staged",
    }  # fmt: skip
    text = (tmp_path / "report" / "report.md").read_text()
    assert all(f"| {name} |" in text and f"## {name}: passed" in text for name in sections)
    assert "gpu_train.py losses" in (tmp_path / "report" / "programs.log").read_text()


def python(code, limit, tmp_path):
    return gpu_jobs.run([sys.executable, "-c", code], {}, tmp_path, limit)


def test_a_program_past_its_time_is_ended_with_what_it_started(tmp_path):
    code = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '77'])"
    start = time.monotonic()
    outcome = python(code, 1.0, tmp_path)
    assert time.monotonic() - start < 10
    assert (outcome.status, outcome.printed) == (gpu_jobs.TIMED_OUT, "begun\n")
    assert outcome.problem.startswith("ended after its time")
    until(lambda: "sleep 77" not in run_command(["ps", "-eo", "args"], timeout=20)[1], "the end of sleep", 10)


def test_bits_that_differ_are_no_pass():
    line = {"losses": [1.0], "norms": [2.0], "digest": "x"}
    section = Section("ranks", "")
    gpu_check.compare(section, "same", {"a": line}, {"a": {**line, "notes": ["transport: staged"]}})
    gpu_check.compare(section, "digest", {"a": line}, {"a": {**line, "digest": "y"}})
    gpu_check.compare(section, "none", {"a": line}, {})
    assert [verdict.ok for verdict in section.verdicts] == [True, False, False]
    assert "transport: staged" in section.verdicts[0].found


def test_a_report_passes_only_if_all_of_it_was_seen(tmp_path):
    seen, unseen = Section("one", "First.", 1.0), Section("two", "Second.")
    seen.judge("this | that", "yes", "yes", True)
    unseen.not_run("no time was left")
    unseen.tables["Figures"] = [{"a": 1234567.0, "b": "x\ny"}, {"b": 0.123456}]
    report = Report("A check", ["a note"], [seen])
    assert report.passed
    seen.judge("more", "yes", "not run: no --torch-python", None)
    assert (seen.state, report.passed) == ("passed", False)
    seen.verdicts.pop()
    report.sections.append(unseen)
    assert not report.passed
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| one | 1 | ok | this / that | yes | yes |" in text
    assert "| two | 0 | - | Second. | to be seen | not run: no time was left |" in text
    assert "| 1,234,567 | x y |\n|  | 0.1235 |" in text
