"""benchmarks/gpu_check.py without a GPU: it says so in one line, and on the pretend CuPy it does its work."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path

import pytest
from jobs import run_command
from test_command_bits import needs_mpiexec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_jobs  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_setup  # noqa: E402
import gpu_speed  # noqa: E402
import gpu_step  # noqa: E402
from gpu_report import Report, Section  # noqa: E402

CHECK = [sys.executable, BENCHMARKS / "gpu_check.py"]


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++: the pretend CuPy compiles kernels by it"
)


def has_gpu():
    try:
        return gpu_setup.cuda_version() > 0
    except gpu_setup.NotReady:
        return False


@pytest.mark.skipif(has_gpu(), reason="there is a GPU, on which the check would begin")
def test_without_a_gpu_it_is_one_line(tmp_path):
    status, printed, errors = run_command([*CHECK, "--out", tmp_path / "report"], timeout=20)
    assert (status, printed) == (2, "")
    assert re.fullmatch(r"gpu_check: no GPU: .*; --pretend .*\n", errors)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--pretend"], "--out DIR"),
        (["--out", "/dev/null/x", "--pretend"], "--out /dev/null/x"),
        (["--out", "x", "--pretend", "--torch-python", "no-such"], "--torch-python no-such"),
    ],
)
def test_what_is_missing_is_one_line(flags, named, tmp_path):
    status, printed, errors = run_command([*CHECK, *flags], timeout=20, cwd=tmp_path)
    assert (status, printed, errors.count("\n")) == (2, "", 1)
    assert f"gpu_check: {named}: " in errors


@needs_mpiexec
@needs_compiler
@pytest.mark.timeout_seconds(240)
def test_the_parts_that_need_no_gpu(tmp_path):
    quick = "tests/gpu/test_offload.py::test_without_offload_nothing_is_on_the_host"
    flags = ["--pretend", "--out", tmp_path / "report", "--tests", quick, "--ranks", "1", "2"]
    status, printed, errors = run_command([*CHECK, *flags], timeout=200)
    assert (status, errors) == (0, ""), printed
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    sections = {section["name"]: section for section in found["sections"]}
    assert list(sections) == ["machine", "tests", "losses", "ranks"]
    assert {section["state"] for section in sections.values()} == {"passed"}
    whats = {verdict["what"] for section in sections.values() for verdict in section["verdicts"]}
    assert whats >= {
        "a product on it", "tests/gpu on 1 rank", "losses of tiny-gpt2:fp32", "losses of tiny-llama:bf16",
        "moments offloaded, one rank", "2 ranks, staged",
    }  # fmt: skip
    text = (tmp_path / "report" / "report.md").read_text()
    assert all(f"| {name} |" in text and f"## {name}: passed" in text for name in sections)
    assert "gpu_losses.py" in (tmp_path / "report" / "programs.log").read_text()


def python(code, limit, tmp_path):
    return gpu_jobs.run([sys.executable, "-c", code], {}, tmp_path, limit)


def test_a_program_past_its_time_is_ended_with_what_it_started(tmp_path):
    code = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '77'])"
    begun = time.monotonic()
    outcome = python(code, 1.0, tmp_path)
    assert time.monotonic() - begun < 10
    assert (outcome.status, outcome.printed) == (gpu_jobs.TIMED_OUT, "begun\n")
    assert outcome.problem.startswith("ended after its time")
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 77" not in left


@pytest.mark.parametrize(
    ("code", "objects", "problem"),
    [
        ('print(\'{"a": 1}\'); print("{broken"); raise SystemExit("why not")', [{"a": 1}], "why not"),
        ("raise SystemExit('gone')", [], "gone"),
    ],
)
def test_a_program_that_fails_says_what(code, objects, problem, tmp_path):
    outcome = python(code, 20, tmp_path)
    assert (outcome.objects, outcome.problem) == (objects, f"status 1: {problem}")
    program = gpu_jobs.Answerer([sys.executable, "-c", code], {}, tmp_path)
    assert program.answer(20) == (objects or [None])[0]
    assert program.ask(1, 20) is None
    last, outcome = program.close(20)
    assert (last, outcome.problem) == (None, f"status 1: {problem}")


def test_programs_take_turns(tmp_path):
    code = (
        "import json, sys\nprint('noise'); print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin: print(json.dumps({'ms': [1.0] * int(line)}), flush=True)\n"
        "print(json.dumps({'end': 1}))"
    )
    programs = [gpu_jobs.Answerer([sys.executable, "-c", code], {}, tmp_path) for _ in range(2)]
    assert [program.answer(20) for program in programs] == [{"ready": True}] * 2
    answers = [program.ask(n, 20) for n, program in enumerate(programs, 1)]
    assert answers == [{"ms": [1.0]}, {"ms": [1.0, 1.0]}]
    ends = [program.close(20) for program in programs]
    assert [(last, outcome.problem) for last, outcome in ends] == [({"end": 1}, "")] * 2


@needs_compiler
def test_steps_are_timed_when_they_are_asked_for(tmp_path):
    ready = gpu_setup.make_pretend(tmp_path)
    step = [str(BENCHMARKS / "gpu_step.py"), "--workload", "tiny-llama", "--offload", "moments"]
    program = gpu_jobs.Answerer([ready.python, *step], ready.env, tmp_path)
    start = program.answer(60)
    assert (start["ready"], start["tokens"]) == (True, 16)
    first, second = program.ask(3, 60), program.ask(2, 60)
    assert (len(first["ms"]), len(second["ms"])) == (3, 2)
    assert min(first["ms"] + second["ms"]) > 0
    end, outcome = program.close(60)
    assert (outcome.problem, end["loss"] < start["loss"]) == ("", True)
    assert end["pool_mb"] > 32  # the products' workspace


def test_idle_time_is_what_no_kernel_fills():
    """Two streams that overlap, a gap, and what was before the time that counts."""

    def event(kind, start, stop):
        return {"cat": kind, "ts": start, "dur": stop - start}

    events = [
        event("kernel", 0, 100), event("kernel", 900, 1100), event("gpu_memcpy", 1050, 1300),
        event("kernel", 1200, 1250), event("cpu_op", 1300, 1400), event("gpu_memset", 1700, 2000),
    ]  # fmt: skip
    found = gpu_step.idle_share(events, 1e-3)
    assert found["kernels"] == 4
    assert found["busy_seconds"] == pytest.approx(600e-6)
    assert found["idle"] == pytest.approx(0.4)


def test_figures_of_a_race():
    """GPT-2 124M at half a million tokens a second is at 43 % of the peak, as everybody counts it."""
    racer = gpu_speed.Racer("ours", None, {"tokens": 32768, "parameters": 124_439_808}, {"pool_mb": 5.0})
    racer.ms = [1e3 * 32768 / 500_000] * 20
    found = gpu_speed.row(racer, "gpt2-124m")
    assert found["tokens/s"] == pytest.approx(500_000)
    assert found["share of peak"] == pytest.approx(0.435, abs=0.001)
    assert (found["steps"], found["pool_mb"]) == (20, 5.0)


def test_distance_of_losses():
    for ours, theirs, expected in (
        ([1.0, 2.0], [1.0, 2.02], 0.02 / 2.02),
        ([1.0], [1.0, 2.0], float("inf")),
        ([float("nan")], [1.0], float("inf")),
    ):
        assert gpu_parts.distance(ours, theirs) == pytest.approx(expected)


def test_bits_that_differ_are_no_pass():
    line = {"losses": [1.0], "norms": [2.0], "digest": "x"}
    section = Section("ranks", "")
    gpu_parts.compare(section, "same", {"a": line}, {"a": {**line, "notes": ["transport: staged"]}})
    gpu_parts.compare(section, "digest", {"a": line}, {"a": {**line, "digest": "y"}})
    gpu_parts.compare(section, "none", {"a": line}, {})
    assert [verdict.ok for verdict in section.verdicts] == [True, False, False]
    assert "transport: staged" in section.verdicts[0].found


def test_the_first_way_over_a_cuda_aware_mpi_that_works_is_kept(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text("")
    ready = gpu_setup.Ready(sys.executable, gpu_setup.environment(sys.executable, tmp_path))
    line = {"run": "a", "losses": [1.0], "norms": [2.0], "digest": "x"}
    tried = []

    def sharded(check, section, started, env, *flags):
        tried.append((started[-1], env.get("UCX_TLS")))
        if "cuda_ipc" in env.get("UCX_TLS", ""):
            section.problems.append("IPC is not possible")
            return []
        return [line]

    monkeypatch.setattr(gpu_parts, "sharded", sharded)
    check = gpu_parts.Check(ready, tmp_path, tmp_path, 1e12, False, [], [1, 2, 4], tmp_path, None)
    section = Section("ranks", "")
    gpu_parts.over_aware_mpi(check, section, {"a": line})
    without = "sm,self,cuda_copy"
    assert tried == [("2", f"{without},cuda_ipc"), ("2", without), ("4", without)]
    assert [(verdict.what, verdict.ok) for verdict in section.verdicts] == [
        ("2 ranks, CUDA-aware MPI (ucx without IPC)", True),
        ("4 ranks, CUDA-aware MPI (ucx without IPC)", True),
    ]
    assert (section.state, list(section.tables)) == (
        "passed", ["Attempts over the CUDA-aware MPI that failed"]
    )  # fmt: skip


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


def test_what_no_interpreter_has_is_to_be_brought(tmp_path, monkeypatch):
    env = gpu_setup.environment(sys.executable, tmp_path)
    wanted = ["numpy>=2", "zero-mpi-never-written[extra]>=1.0"]
    assert gpu_setup.missing(sys.executable, wanted, env) == ["zero-mpi-never-written"]
    (tmp_path / "wheels").mkdir()
    python = gpu_setup.make_venv(tmp_path / "venv")
    env = gpu_setup.environment(python, tmp_path)
    notes = gpu_setup.install(python, wanted, tmp_path / "wheels", env)
    said = "not installed: zero-mpi-never-written. Without a package index: pip download"
    assert notes[-1].startswith(said)
    assert gpu_setup.lacking(python, ["numpy>=2", "numpy>=99", "pytest"], env) == ["numpy>=99"]
    monkeypatch.setattr(gpu_setup, "pip", lambda *_: "no network")
    notes = gpu_setup.install(python, ["numpy>=99"], None, env)
    said = f"not installed: numpy ({metadata.version('numpy')} is). Without a package index: pip download"
    assert notes[-1].startswith(said)  # and so it has to do
    with pytest.raises(gpu_setup.NotReady, match=r"cupy-cuda99x.*--wheels WHEELS"):
        gpu_setup.install(python, ["cupy-cuda99x>=1"], None, env)


def test_an_mpi_is_found_in_folders_and_archives(tmp_path):
    binary = tmp_path / "some" / "ompi" / "bin" / "mpirun"
    binary.parent.mkdir(parents=True)
    binary.write_text("")
    assert gpu_setup.unpack(tmp_path / "some", tmp_path) == tmp_path / "some" / "ompi"
    assert gpu_setup.unpack(tmp_path / "some" / "ompi", tmp_path) == tmp_path / "some" / "ompi"
    with tarfile.open(tmp_path / "some.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "some", "some")
    root = gpu_setup.unpack(tmp_path / "some.tar.gz", tmp_path / "scratch")
    assert root == tmp_path / "scratch" / "mpi" / "some" / "ompi"
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(gpu_setup.NotReady, match=r"--mpi-root .*text"):
        gpu_setup.unpack(tmp_path / "text", tmp_path / "other")
    with pytest.raises(gpu_setup.NotReady, match="no bin/mpirun"):
        gpu_setup.unpack(binary.parent, tmp_path)
