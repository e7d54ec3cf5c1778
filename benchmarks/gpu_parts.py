"""The parts of the check that tell right from wrong: tests, losses beside the CPU's, numbers of ranks.

Each part is given a `Check`, runs programs by it, and fills in its `Section`. `gpu_speed.py` has the others.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_jobs import Job, Outcome, run
from gpu_report import Section
from gpu_setup import ATTEMPTS, ROOT, NotReady, Ready, aware, launcher, unpack

HERE = Path(__file__).resolve().parent
SUMMARY = re.compile(r"=*\s*((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s")
FP32_BOUND = 1e-5  # of any step
BF16_BOUNDS = 1e-3, 5e-2  # of the median step and of any: W2 is unstable at step 14, where precisions part
SHARDED = ["W3:fp32", "W3:bf16", "W1:bf16"]
CPU_THREADS = "8"
RANKS_SECONDS = 45  # for each number of ranks


@dataclass
class Check:
    """What all parts share. background: jobs that were started earlier, by name."""

    ready: Ready
    out: Path
    scratch: Path
    deadline: float  # of time.monotonic()
    pretend: bool
    tests: Sequence[str]
    ranks: Sequence[int]
    mpi_root: Path | None
    torch_python: str | None
    background: dict[str, Job] = field(default_factory=dict)

    def left(self, most: float) -> float:
        """Seconds for something that may take `most`."""
        return max(0.0, min(most, self.deadline - time.monotonic()))

    def script(self, name: str, *flags: str) -> list[str]:
        """The command of one of the scripts beside this one."""
        return [self.ready.python, str(HERE / name), *flags]

    def run(
        self, section: Section, command: Sequence[str], limit: float, env: Mapping[str, str] | None = None
    ) -> Outcome:
        """Run a program; what it says goes to the log, and to the section if it fails."""
        outcome = run(command, self.ready.env if env is None else env, ROOT, self.left(limit))
        self.log(command, outcome)
        if outcome.status:
            section.problems.append(f"{shown(command)}\n{outcome.problem}")
        return outcome

    def log(self, command: Sequence[str], outcome: Outcome) -> None:
        """All that a program said, one after the other in one file."""
        with (self.out / "programs.log").open("a") as file:
            file.write(f"\n$ {shown(command)}\n[status {outcome.status}, {outcome.seconds:.1f} s]\n")
            file.write(f"{outcome.printed}{outcome.errors}")


def shown(command: Sequence[str]) -> str:
    """A command for people."""
    return " ".join(part.removeprefix(f"{ROOT}/") for part in command)


# ------------------------------------------------------------------------------------------------- machine


def machine(check: Check, section: Section) -> None:
    """Versions, the device, and whether a product comes out right."""
    outcome = check.run(section, check.script("gpu_machine.py"), 90)
    if not outcome.objects:
        section.judge("a GPU that CuPy can use", "one", "none", False)
        return
    facts = outcome.objects[-1]
    section.judge("a GPU that CuPy can use", "one", facts["device"], True)
    section.judge("a product on it", "right", facts["problem"] or "right", facts["problem"] is None)
    rows = [{"what": name, "found": value} for name, value in facts.items() if not isinstance(value, dict)]
    section.tables["Facts"] = rows
    versions = facts["packages"].items()
    section.tables["Packages"] = [{"package": name, "version": version} for name, version in versions]


# --------------------------------------------------------------------------------------------------- tests


def tests(check: Check, section: Section) -> None:
    """tests/gpu with the CuPy at hand, in one process and on two ranks."""
    for ranks, limit in ((1, 180.0), (2, 90.0)):
        command = [check.ready.python, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--color=no"]
        env = check.ready.env | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "ZERO_MPI_TEST_GPU": "1"}
        command += ["-W", "default", *check.tests]  # of other versions of packages; CI has warnings as errors
        if ranks > 1:
            started = launcher(check.ready)
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


def names_of_losses(check: Check) -> list[str]:
    """Workloads, the smallest first."""
    return ["tiny-gpt2", "tiny-llama"] if check.pretend else ["W3", "W1", "W2"]


def losses_command(check: Check, *flags: str) -> list[str]:
    """Train some steps."""
    return check.script("gpu_losses.py", "--steps", "3" if check.pretend else "20", *flags)


def start_losses_of_cpu(check: Check) -> None:
    """The CPU's losses take a minute or two, beside which the GPU has other things to do."""
    runs = [f"{name}:fp32" for name in names_of_losses(check)]
    threads = "1" if check.pretend else CPU_THREADS
    command = losses_command(check, "--device", "cpu", "--threads", threads, "--run", *runs)
    check.background["losses"] = Job(command, check.ready.env, ROOT)


def losses(check: Check, section: Section) -> None:
    """Losses of the workloads on the GPU beside the CPU's."""
    runs = [f"{name}:{kind}" for name in names_of_losses(check) for kind in ("fp32", "bf16")]
    outcome = check.run(section, losses_command(check, "--device", "cuda", "--run", *runs), 120)
    job = check.background.pop("losses")
    on_cpu = job.wait(check.left(120))
    check.log(job.command, on_cpu)
    if on_cpu.status:
        section.problems.append(f"on the CPU: {on_cpu.problem}")
    wanted = {found["run"].partition(":")[0]: found["losses"] for found in on_cpu.objects}
    for run_name in runs:
        name, _, kind = run_name.partition(":")
        median, most = BF16_BOUNDS if kind == "bf16" else (FP32_BOUND, FP32_BOUND)
        wish = f"median within {median:g}, all within {most:g} of the CPU's"
        ours = next((found["losses"] for found in outcome.objects if found["run"] == run_name), None)
        if ours is None or name not in wanted:
            section.judge(f"losses of {run_name}", wish, "not computed", False)
            continue
        middle, far = distances(ours, wanted[name])
        found = f"{middle:.2g}, {far:.2g} over {len(ours)} steps, {ours[0]:.5f} to {ours[-1]:.5f}"
        section.judge(f"losses of {run_name}", wish, found, middle <= median and far <= most)


def distances(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The median and the largest relative difference; infinite if one is no number or missing."""
    pairs = list(zip(ours, theirs, strict=False))
    if len(ours) != len(theirs) or not all(map(math.isfinite, [*ours, *theirs])):
        return math.inf, math.inf
    apart = [abs(a - b) / abs(b) for a, b in pairs]
    return statistics.median(apart), max(apart)


# --------------------------------------------------------------------------------------------------- ranks


def ranks(check: Check, section: Section) -> None:
    """1, 2 and 4 ranks on one GPU give the same bits, over host memory and over a CUDA-aware MPI."""
    alone = {line["run"]: line for line in sharded(check, section, [], None)}
    if not alone:
        section.judge("one rank", "to train", "it does not", False)
        return
    kept = {line["run"]: line for line in sharded(check, section, [], None, "--offload", "moments")}
    compare(section, "moments offloaded, one rank", alone, kept)
    started = launcher(check.ready)
    for count in (count for count in check.ranks if count > 1):
        what = f"{count} ranks, staged"
        if started is None:
            section.judge(what, "as one rank", "no mpiexec", False)
            continue
        command = [*started, "-n", str(count)]
        lines = sharded(check, section, command, None, "--transport", "staged")
        compare(section, what, alone, {line["run"]: line for line in lines})
    if check.mpi_root is not None:
        over_aware_mpi(check, section, alone)
    elif not check.pretend:
        section.judge("ranks over a CUDA-aware MPI", "as one rank", "not run: no --mpi-root", None)


def sharded(
    check: Check, section: Section, started: list[str], env: Mapping[str, str] | None, *flags: str
) -> list[dict[str, Any]]:
    """The lines of a run of four micro-batches a step, which any number of ranks share."""
    runs = ["tiny-gpt2:fp32", "tiny-gpt2:bf16"] if check.pretend else SHARDED
    steps = "2" if check.pretend else "5"
    own = ["--device", "cuda", "--micro-batches", "4", "--steps", steps, *flags, "--run", *runs]
    return check.run(section, [*started, *check.script("gpu_losses.py", *own)], RANKS_SECONDS, env).objects


def over_aware_mpi(check: Check, section: Section, alone: Mapping[str, Any]) -> None:
    """The first way of moving device memory that works on two ranks is taken for all."""
    assert check.mpi_root is not None
    try:
        root = unpack(check.mpi_root, check.scratch)
    except NotReady as error:
        section.judge("ranks over a CUDA-aware MPI", "as one rank", str(error), False)
        return
    way = None
    for count in (count for count in check.ranks if count > 1):
        for attempt in ATTEMPTS if way is None else (way,):
            tried = Section(section.name, section.about)  # an attempt that fails is told, but is no failure
            started, env = aware(root, check.ready, attempt)
            command = [*started, "-n", str(count)]
            lines = sharded(check, tried, command, env, "--transport", "mpi")
            if lines and not tried.problems:
                way = attempt
                break
            rows = section.tables.setdefault("Attempts over the CUDA-aware MPI that failed", [])
            rows.append({"way": attempt, "ranks": count, "said": " ".join(tried.problems)[-600:]})
        what = f"{count} ranks, CUDA-aware MPI" + (f" ({way})" if way else "")
        compare(section, what, alone, {line["run"]: line for line in lines})


def compare(section: Section, what: str, alone: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Losses, norms and the parameters' digest must be equal, not close."""
    same = [
        run_name
        for run_name, line in alone.items()
        if all(others.get(run_name, {}).get(key) == line[key] for key in ("losses", "norms", "digest"))
    ]
    notes = sorted({note for line in others.values() for note in line.get("notes", ())})
    found = f"{len(same)} of {len(alone)} runs equal{''.join(f'; {note}' for note in notes)}"
    section.judge(what, "the bits of one rank", found, len(same) == len(alone))
