"""Runs every check that needs a GPU, in less than ten minutes, and writes a report.

    python3 benchmarks/gpu_check.py --out REPORT --venv /tmp/zero_mpi --torch-python python3

Each part runs its programs with a time limit, so a failed part does not stop the rest. The report
(`report.md`, `report.json`) is rewritten after each part; `programs.log` has all output. Exit status: 0 if
all checks pass, 1 if one fails or was not run, 2 if it cannot start (no GPU). `--pretend` needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # so that imports work in any working folder

from gpu_jobs import Job, Outcome, Report, Section, run
from gpu_setup import ATTEMPTS, ROOT, NotReady, Ready, aware, launcher, make_pretend, make_ready, unpack
from workloads import ALL, PEAK

LIMIT = 570.0  # seconds for all parts together
LEAST = 5.0  # a part only begins if this many seconds are left
BAD_USAGE = 2
FIRST_SECONDS, RANKS_SECONDS = 100, 45  # limits in seconds for all experiments; for each number of ranks
TESTS_SECONDS = {1: 180.0, 2: 90.0}  # number of ranks -> limit in seconds
SUMMARY = re.compile(r"=*\s*((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s")
FP32_BOUND = 1e-5  # limit on the relative difference of losses, at any step
BF16_BOUNDS = 1e-3, 5e-2  # the same for the median step, and for any step (W2 is unstable at step 14)
SHARDED = ["W3:fp32", "W3:bf16", "W1:bf16"]
CPU_THREADS = "8"
TURNS, STEPS = 3, 10  # turns of each program; timed steps per turn
START_SECONDS, TURN_SECONDS = 150, 40  # limits in seconds; a start includes compilation
AHEAD = 1.1  # required ratio of our tokens per second to torch's
TARGETS = {"gpt2-124m": ("compile", 500_000.0), "llama-1b": ("fsdp2", 50_000.0)}
TUNED = ("gpt2-124m",)  # workloads also timed with tuned matmuls, where GPU memory suffices
FASTEST = 600  # required TFLOP/s of a bf16 matmul of 8192 x 8192 matrices
MOST_IDLE = 0.05
MEASURED, DRAWN = 20, 3  # number of steps that are measured; number of steps in the timeline


@dataclass
class Check:
    """Settings and state that all parts share. background: name -> job that still runs."""

    ready: Ready
    out: Path
    scratch: Path
    deadline: float  # in seconds of time.monotonic()
    pretend: bool
    tests: Sequence[str]
    ranks: Sequence[int]
    mpi_root: Path | None
    torch_python: str | None
    background: dict[str, Job] = field(default_factory=dict)

    def left(self, most: float) -> float:
        """Return `most` seconds, or the seconds to the deadline if these are fewer."""
        return max(0.0, min(most, self.deadline - time.monotonic()))

    def script(self, name: str, *flags: str) -> list[str]:
        """Return the command that runs a script in this folder."""
        return [self.ready.python, str(ROOT / "benchmarks" / name), *flags]

    def run(
        self, section: Section, command: Sequence[str], limit: float, env: Mapping[str, str] | None = None
    ) -> Outcome:
        """Run a program and log its output. If it fails, add its problem to the section."""
        outcome = run(command, self.ready.env if env is None else env, ROOT, self.left(limit))
        self.log(command, outcome)
        if outcome.status:
            section.problems.append(f"{shown(command)}\n{outcome.problem}")
        return outcome

    def log(self, command: Sequence[str], outcome: Outcome) -> None:
        """Append the output of a program to the log."""
        with (self.out / "programs.log").open("a") as file:
            file.write(f"\n$ {shown(command)}\n[status {outcome.status}, {outcome.seconds:.1f} s]\n")
            file.write(f"{outcome.printed}{outcome.errors}")


def shown(command: Sequence[str]) -> str:
    """Return a command as a line of text, for the report."""
    return " ".join(part.removeprefix(f"{ROOT}/") for part in command)


# --------------------------------------------------------------------------------------------------- first


def first(check: Check, section: Section) -> None:
    """Check the machine, CuPy and the results of operations. Time operations and whole steps in bf16."""
    flags = ["--seconds", str(FIRST_SECONDS), *(["--tiny"] if check.pretend else [])]
    outcome = check.run(section, check.script("gpu_first.py", *flags), FIRST_SECONDS + 20)
    found = {line.pop("what"): line for line in outcome.objects}
    facts = found.pop("machine", {})
    section.judge("a GPU that CuPy can use", "one", facts.get("device", "none"), "device" in facts)
    problem = facts.get("problem", facts.get("error", "not tried"))
    section.judge("a product on it", "right", problem or "right", problem is None)
    packages = facts.pop("packages", {}).items()
    section.tables["Facts"] = [{"what": name, "found": value} for name, value in facts.items()]
    section.tables["Packages"] = [{"package": name, "version": version} for name, version in packages]
    rates = {name: line for name, line in found.items() if "rate" in line}
    section.tables["Rates in bf16"] = [{"what": name} | line for name, line in rates.items()]
    rest = [{"what": name, "found": str(line)} for name, line in found.items() if name not in rates]
    section.tables["The rest"] = rest
    failed = [name for name, line in found.items() if "error" in line]
    section.judge("experiments", "none fails", ", ".join(failed) or "none failed", bool(found) and not failed)
    wishes = (("streams", "the compute stream", "stays the current one"),)
    wishes += (("lent arrays", "memory of activations", "is free again after the last view"),)
    for name, what, wish in wishes:
        seen = {key: value for key, value in found.get(name, {}).items() if isinstance(value, bool)}
        section.judge(what, wish, str(seen), bool(seen) and all(seen.values()))
    refused = found.get("right: products", {}).get("refused", ["not tried"])
    section.judge("shapes that cuBLASLt refuses", "none", str(refused), not refused)
    if not check.pretend:
        square = found.get("linear, square", {}).get("rate", 0)
        text = f"{square:.0f} TFLOP/s" if square else "not measured"
        wish = f"at least {FASTEST} TFLOP/s"
        section.judge("a product of 8192 x 8192 matrices", wish, text, square >= FASTEST)


# --------------------------------------------------------------------------------------------------- tests


def tests(check: Check, section: Section) -> None:
    """Run tests/gpu with the installed CuPy, in one process and on two ranks."""
    started = launcher(check.ready)
    for ranks, limit in TESTS_SECONDS.items():
        command = [check.ready.python, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--color=no"]
        env = check.ready.env | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "ZERO_MPI_TEST_GPU": "1"}
        command += ["-W", "default", *check.tests]  # other package versions may warn; CI fails on warnings
        if ranks > 1:
            if started is None or ranks not in check.ranks:
                continue
            command = [*started, "-n", str(ranks), *command, "-p", "pytest_mpi", "--with-mpi"]
        outcome = check.run(section, command, limit, env)
        found = SUMMARY.findall(outcome.printed)
        summary = found[-1] if found else f"no summary, status {outcome.status}"
        passed = outcome.status == 0 and " passed" in f" {summary}" and not re.search("failed|error", summary)
        what = f"tests/gpu on {ranks} rank{'s' if ranks > 1 else ''}"
        section.judge(what, "all pass", summary, passed)
        failed = [line for line in outcome.printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if failed:
            section.tables[f"Failed on {ranks}"] = [{"test": line[:300]} for line in failed[:60]]


# -------------------------------------------------------------------------------------------------- losses


def losses_command(check: Check, *kinds: str) -> list[str]:
    """Return the command that trains the workloads for some steps, the smallest first."""
    names = ["tiny-gpt2", "tiny-llama"] if check.pretend else ["W3", "W1", "W2"]
    runs = [f"{name}:{kind}" for name in names for kind in kinds]
    steps = "3" if check.pretend else "20"
    return check.script("gpu_train.py", "losses", "--steps", steps, "--run", *runs)


def start_losses_of_cpu(check: Check) -> None:
    """Start to compute the losses on the CPU in the background, which takes a minute or two."""
    threads = "1" if check.pretend else CPU_THREADS
    command = [*losses_command(check, "fp32"), "--device", "cpu", "--threads", threads]
    check.background["losses"] = Job(command, check.ready.env, ROOT)


def losses(check: Check, section: Section) -> None:
    """Compare the losses on the GPU with those on the CPU, for each workload."""
    command = [*losses_command(check, "fp32", "bf16"), "--device", "cuda"]
    computed = {line["run"]: line["losses"] for line in check.run(section, command, 120).objects}
    job = check.background.pop("losses")
    on_cpu = job.wait(check.left(120))
    check.log(job.command, on_cpu)
    if on_cpu.status:
        section.problems.append(f"on the CPU: {on_cpu.problem}")
    wanted = {found["run"].partition(":")[0]: found["losses"] for found in on_cpu.objects}
    for run_name in (word for word in command if ":" in word):
        name, _, kind = run_name.partition(":")
        median, most = BF16_BOUNDS if kind == "bf16" else (FP32_BOUND, FP32_BOUND)
        wish = f"median within {median:g}, all within {most:g} of the CPU's"
        ours = computed.get(run_name)
        if ours is None or name not in wanted:
            section.judge(f"losses of {run_name}", wish, "not computed", False)
            continue
        middle, far = distances(ours, wanted[name])
        found = f"{middle:.2g}, {far:.2g} over {len(ours)} steps, {ours[0]:.5f} to {ours[-1]:.5f}"
        section.judge(f"losses of {run_name}", wish, found, middle <= median and far <= most)


def distances(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the median and the largest relative difference; infinity if a loss is missing or not finite."""
    if len(ours) != len(theirs) or not all(map(math.isfinite, [*ours, *theirs])):
        return math.inf, math.inf
    apart = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(apart), max(apart)


# --------------------------------------------------------------------------------------------------- ranks

Lines = dict[str, dict[str, Any]]  # name of a run -> the JSON object that it printed


def ranks(check: Check, section: Section) -> None:
    """Check that 1, 2 and 4 ranks on one GPU compute equal bits, by staged transfers and a CUDA-aware MPI."""
    alone = sharded(check, section, [], None)
    if not alone:
        section.judge("one rank", "to train", "it does not", False)
        return
    kept = sharded(check, section, [], None, "--offload", "moments")
    compare(section, "moments offloaded, one rank", alone, kept)
    started = launcher(check.ready)
    for count in (count for count in check.ranks if count > 1):
        what = f"{count} ranks, staged"
        if started is None:
            section.judge(what, "as one rank", "no mpiexec", False)
            continue
        command = [*started, "-n", str(count)]
        compare(section, what, alone, sharded(check, section, command, None, "--transport", "staged"))
    if check.mpi_root is not None:
        over_aware_mpi(check, section, check.mpi_root, alone)
    elif not check.pretend:
        section.judge("ranks over a CUDA-aware MPI", "as one rank", "not run: no --mpi-root", None)


def sharded(
    check: Check, section: Section, started: list[str], env: Mapping[str, str] | None, *flags: str
) -> Lines:
    """Run steps with four micro-batches on some ranks. Return what each run printed."""
    runs = ["tiny-gpt2:fp32", "tiny-gpt2:bf16"] if check.pretend else SHARDED
    own = ["--device", "cuda", "--micro-batches", "4", "--steps", "2" if check.pretend else "5", *flags]
    command = [*started, *check.script("gpu_train.py", "losses", *own, "--run", *runs)]
    return {line["run"]: line for line in check.run(section, command, RANKS_SECONDS, env).objects}


def over_aware_mpi(check: Check, section: Section, given: Path, alone: Lines) -> None:
    """Compare runs over the first MPI setting that can move device memory. Raises NotReady without an MPI."""
    root, way = unpack(given, check.scratch), None
    for count in (count for count in check.ranks if count > 1):
        lines: Lines = {}
        for attempt in ATTEMPTS if way is None else (way,):
            tried = Section(section.name, section.about)  # a failed attempt does not make the check fail
            started, env = aware(root, check.ready, attempt)
            lines = sharded(check, tried, [*started, "-n", str(count)], env, "--transport", "mpi")
            if lines and not tried.problems:
                way = attempt
                break
            rows = section.tables.setdefault("Attempts over the CUDA-aware MPI that failed", [])
            rows.append({"way": attempt, "ranks": count, "said": " ".join(tried.problems)[-600:]})
        compare(section, f"{count} ranks, CUDA-aware MPI" + (f" ({way})" if way else ""), alone, lines)


def compare(section: Section, what: str, alone: Lines, others: Lines) -> None:
    """Judge whether runs have bit-identical losses, norms and parameters (by their digest)."""
    keys = "losses", "norms", "digest"
    pairs = [(line, others.get(name, {})) for name, line in alone.items()]
    same = [line for line, other in pairs if all(other.get(key) == line[key] for key in keys)]
    notes = sorted({note for line in others.values() for note in line.get("notes", ())})
    found = f"{len(same)} of {len(alone)} runs equal{''.join(f'; {note}' for note in notes)}"
    section.judge(what, "the bits of one rank", found, len(same) == len(alone))


# --------------------------------------------------------------------------------------------------- speed


@dataclass
class Racer:
    """A running training program: its first answer, the times of its steps, and its last answer."""

    name: str
    program: Job
    start: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    ms: list[float] = field(default_factory=list)
    problem: str = ""

    def close(self, check: Check) -> None:
        """End the program and its child processes."""
        self.end, outcome = self.program.close(check.left(20))
        self.problem = outcome.problem
        check.log(self.program.command, outcome)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of the median step."""
        assert self.start is not None
        return 1e3 * self.start["tokens"] / statistics.median(self.ms)


def race(check: Check, section: Section, workload: str) -> list[Racer]:
    """Time our steps and torch's, which take turns. All stay loaded, so the GPU's state is the same."""
    mode, _ = TARGETS[workload]
    flags, env = ["--workload", workload], check.ready.env
    step = check.script("gpu_train.py", "steps", *flags)
    racers = [Racer("ours", Job(step, env, ROOT))]
    if workload in TUNED:
        racers.append(Racer("ours, products tuned", Job(step, env | {"ZERO_MPI_GPU_TUNE": "1"}, ROOT)))
    if check.torch_python is not None:  # torch runs in the environment of this script
        command = [check.torch_python, str(ROOT / "benchmarks/gpu_torch.py"), *flags, "--mode", mode]
        racers.append(Racer(f"torch {mode}", Job(command, os.environ, ROOT)))
    try:
        for racer in racers:
            racer.start = racer.program.answer(check.left(START_SECONDS))
        for _ in range(TURNS):
            for racer in racers:
                answer = racer.program.ask(STEPS, check.left(TURN_SECONDS)) if racer.start else None
                racer.ms += answer["ms"] if answer else []
    finally:
        for racer in racers:
            racer.close(check)
    for racer in racers:
        if racer.problem or not racer.ms:
            section.problems.append(f"{workload}, {racer.name}: {racer.problem or 'no steps'}")
    return [racer for racer in racers if racer.ms]


def speed(check: Check, section: Section, workload: str) -> None:
    """Judge our tokens per second, and compare them and our memory with torch's."""
    _, wanted = TARGETS[workload]
    racers = race(check, section, workload)
    title = f"{workload}: {TURNS} turns of {STEPS} steps each"
    section.tables[title] = [row(racer, workload) for racer in racers]
    ours = next((racer for racer in racers if racer.name == "ours"), None)
    peer = next((racer for racer in racers if racer.name.startswith("torch")), None)
    found = "no steps" if ours is None else f"{ours.tokens_per_second:,.0f}"
    fast = ours is not None and ours.tokens_per_second >= wanted
    section.judge(f"{workload}, tokens per second", f"at least {wanted:,.0f}", found, fast)
    if ours is None or peer is None:
        ran = check.torch_python is not None
        found = "not both ran" if ran else "not run: no --torch-python"
        section.judge(f"{workload}, compared with torch", f"{AHEAD} x", found, False if ran else None)
        return
    ratio = ours.tokens_per_second / peer.tokens_per_second
    section.judge(f"{workload}, against {peer.name}", f"at least {AHEAD} x", f"{ratio:.3f} x", ratio >= AHEAD)
    own, theirs = ((racer.end or {}).get("pool_mb") for racer in (ours, peer))
    fits = None if own is None or theirs is None else own <= theirs
    what = f"{workload}, memory taken from the GPU"
    section.judge(what, "not above torch's", f"{own} and {theirs} MiB", fits)


def row(racer: Racer, workload: str) -> dict[str, Any]:
    """Return the row of the table for a program."""
    assert racer.start is not None
    tokens = racer.tokens_per_second
    quarter = statistics.quantiles(racer.ms, n=4) if len(racer.ms) > 1 else racer.ms * 3
    return {
        "program": racer.name,
        "steps": len(racer.ms),
        "ms": statistics.median(racer.ms),
        "quartiles": f"{quarter[0]:.1f} to {quarter[2]:.1f}",
        "tokens/s": tokens,
        "share of peak": tokens * ALL[workload].flop_of_a_token(racer.start["parameters"]) / PEAK,
    } | {name: value for name, value in (racer.end or {}).items() if name.endswith("_mb")}


def gpt2(check: Check, section: Section) -> None:
    """Compare GPT-2 124M at T 1024 in bf16 with torch (torch.compile, SDPA and fused AdamW)."""
    speed(check, section, "gpt2-124m")


def llama(check: Check, section: Section) -> None:
    """Compare a model of the size of Llama-3.2-1B at T 2048 in bf16 with torch's FSDP2 on one GPU."""
    speed(check, section, "llama-1b")


def overhead(check: Check, section: Section) -> None:
    """Judge the fraction of a step of 32k tokens in which the GPU runs no kernel. Write a timeline."""
    path = check.out / "timeline.json"
    program = Job(check.script("gpu_train.py", "steps", "--trace", str(path)), check.ready.env, ROOT)
    start = program.answer(check.left(90))
    found = program.ask(MEASURED, check.left(60)) if start else None
    if found is not None:
        program.ask(DRAWN, check.left(60))  # writes a short timeline for people to read
    _, outcome = program.close(check.left(20))
    check.log(program.command, outcome)
    what, wish = "idle time of the GPU", f"under {MOST_IDLE:.0%}"
    if found is None:
        torch = "No module named 'torch'" in outcome.problem
        section.judge(what, wish, "not seen", None if torch else False)
        section.problems += [] if torch else [outcome.problem]
        return
    section.tables[f"{MEASURED} steps of GPT-2 124M; {path.name} has {DRAWN} more"] = [found]
    text = f"{found['idle']:.1%}, {found['kernels'] / MEASURED:.0f} kernels per step"
    section.judge(what, wish, text, found["idle"] < MOST_IDLE)


# ------------------------------------------------------------------------------------------------- command

PRETENDING = first, ranks, tests, losses  # parts that also work without a GPU
PARTS = {part.__name__: part for part in (first, ranks, gpt2, tests, llama, losses, overhead)}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder of the report ($OUT)")
    parser.add_argument("--venv", type=Path, help="folder for a virtual environment with missing packages")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install, instead of a package index")
    parser.add_argument("--torch-python", help="interpreter that has torch, for the comparison")
    parser.add_argument("--mpi-root", type=Path, help="a CUDA-aware Open MPI: its folder, or an archive")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=[*PARTS], help="run only these parts, in this order"
    )
    parser.add_argument("--tests", nargs="+", default=["tests/gpu"], help="pytest targets of part `tests`")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="rank counts to test")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all parts together")
    parser.add_argument("--pretend", action="store_true", help="run without a GPU, with a simulated CuPy")
    return parser


def carry_out(check: Check, report: Report, parts: Sequence[Callable[[Check, Section], None]]) -> None:
    """Run the parts in order. Write the report after each part."""
    if losses in parts:
        start_losses_of_cpu(check)
    try:
        for part in parts:
            section = Section(part.__name__, part.__doc__ or "")
            report.sections.append(section)
            begun = time.monotonic()
            try:
                if check.left(LEAST) < LEAST:
                    section.not_run("no time was left")
                else:
                    part(check, section)
            except Exception as error:  # an error of this script must not stop the next parts
                section.problems.append(f"{type(error).__name__}: {error}")
            section.seconds = time.monotonic() - begun
            report.write(check.out)
            tell(section)
    finally:
        for job in check.background.values():
            job.end()


def tell(section: Section) -> None:
    """Print the verdicts of a part, and its problems."""
    print(f"[{section.name}] {section.state} ({section.seconds:.0f} s)", flush=True)
    for verdict in section.verdicts:
        mark = {True: "ok    ", False: "FAILED", None: "-     "}[verdict.ok]
        print(f"  {mark} {verdict.what}: {verdict.found} (wanted: {verdict.wanted})", flush=True)
    for problem in section.problems:
        print(f"  {problem}", flush=True)


def prepare(options: argparse.Namespace, scratch: Path) -> Ready:
    """Prepare the interpreter and its environment, and return them. Raises NotReady."""
    if options.out is None:
        raise NotReady("--out is missing: give the folder of the report")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotReady(f"--out {options.out}: {error.strerror}") from error
    if options.torch_python and shutil.which(options.torch_python) is None:
        raise NotReady(f"--torch-python {options.torch_python}: no such program")
    if options.pretend:
        return make_pretend(scratch)
    venv, wheels = (path and path.resolve() for path in (options.venv, options.wheels))
    return make_ready(venv, wheels, scratch)


def main(arguments: Sequence[str]) -> int:
    """Run the check. Return the exit status."""
    options, begun = make_parser().parse_args(arguments), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zero_mpi-gpu-") as scratch:
        try:
            ready = prepare(options, Path(scratch))
        except NotReady as problem:
            print(f"gpu_check: {problem}", file=sys.stderr)
            return BAD_USAGE
        check = Check(
            ready,
            out=options.out.resolve(),
            scratch=Path(scratch),
            deadline=begun + options.limit,
            pretend=options.pretend,
            tests=options.tests,
            ranks=options.ranks,
            mpi_root=options.mpi_root and options.mpi_root.resolve(),
            torch_python=options.torch_python and shutil.which(options.torch_python),
        )
        title = f"GPU check of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        report = Report(title, [f"environment prepared in {time.monotonic() - begun:.0f} s", *ready.notes])
        (check.out / "programs.log").write_text("")
        chosen = [PARTS[name] for name in options.parts]
        carry_out(check, report, [part for part in chosen if part in PRETENDING or not options.pretend])
    print(f"{'all checks passed' if report.passed else 'not all checks passed'}: {options.out}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
