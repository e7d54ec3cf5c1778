"""The parts of the check that measure: rates of operations, tokens a second beside torch's, idle time.

Ours and torch's programs stay in memory together and take their steps in turn: both meet the same GPU.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from typing import Any

from gpu_jobs import Answerer
from gpu_parts import ROOT, Check
from gpu_report import Section
from gpu_workloads import LARGE, PEAK, flop_of_a_token

FIRST_SECONDS = 100
TURNS, STEPS = 3, 10  # so 30 steps of each
START_SECONDS, TURN_SECONDS = 150, 40  # compiling is part of the start
AHEAD = 1.1  # of torch's tokens a second
TARGETS = {"gpt2-124m": ("compile", 500_000.0), "llama-1b": ("fsdp2", 50_000.0)}
TUNED = ("gpt2-124m",)  # also with the quickest algorithms, for which there is memory beside the others
MOST_IDLE = 0.05
MEASURED, SHOWN = 20, 3  # steps


@dataclass
class Racer:
    """One of the programs: what it told at the start, its steps, and what it told at the end."""

    name: str
    program: Answerer
    start: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    ms: list[float] = field(default_factory=list)
    problem: str = ""

    def turn(self, check: Check) -> None:
        """Some steps."""
        answer = self.program.ask(STEPS, check.left(TURN_SECONDS)) if self.start else None
        self.ms += answer["ms"] if answer else []

    def close(self, check: Check) -> None:
        """The end; nothing of it is left."""
        self.end, outcome = self.program.close(check.left(20))
        self.problem = outcome.problem
        check.log(self.program.job.command, outcome)

    @property
    def tokens_per_second(self) -> float:
        """By the median step."""
        assert self.start is not None
        return 1e3 * self.start["tokens"] / statistics.median(self.ms)


def first(check: Check, section: Section) -> None:
    """Start a process, check results, and time operations and whole steps in bf16."""
    flags = ["--seconds", str(FIRST_SECONDS), *(["--tiny"] if check.pretend else [])]
    outcome = check.run(section, check.script("gpu_first.py", *flags), FIRST_SECONDS + 20)
    found = {line.pop("what"): line for line in outcome.objects}
    section.tables["Rates in bf16"] = [
        {"what": name} | line for name, line in found.items() if "rate" in line
    ]
    rest = [{"what": name, "found": str(line)} for name, line in found.items() if "rate" not in line]
    section.tables["The rest"] = rest
    failed = [name for name, line in found.items() if "error" in line]
    section.judge("experiments", "none fails", ", ".join(failed) or "none failed", bool(found) and not failed)
    kept = found.get("streams", {})
    alike = bool(kept) and all(value for name, value in kept.items() if name.startswith("after"))
    section.judge("the stream of computing", "stays the current one", str(kept), alike)
    refused = found.get("right: products", {}).get("refused", ["not tried"])
    section.judge("shapes that cuBLASLt refuses", "none", str(refused), not refused)
    if check.pretend:
        return
    square = found.get("linear, square", {}).get("rate")
    shown = "not measured" if square is None else f"{square:.0f} TFLOP/s"
    section.judge("a product of 8192 x 8192 matrices", "at least 600 TFLOP/s", shown, (square or 0) >= 600)


def race(check: Check, section: Section, workload: str) -> list[Racer]:
    """Ours and torch's steps in turn."""
    mode, _ = TARGETS[workload]
    flags = ["--workload", workload]
    step, env = check.script("gpu_step.py", *flags), check.ready.env
    racers = [Racer("ours", Answerer(step, env, ROOT))]
    if workload in TUNED:
        racers.append(Racer("ours, products tuned", Answerer(step, env | {"ZERO_MPI_GPU_TUNE": "1"}, ROOT)))
    if check.torch_python is not None:  # in the environment that this script was started in
        script = str(ROOT / "benchmarks" / "gpu_torch.py")
        command = [check.torch_python, script, *flags, "--mode", mode]
        racers.append(Racer(f"torch {mode}", Answerer(command, os.environ, ROOT)))
    try:
        for racer in racers:
            racer.start = racer.program.answer(check.left(START_SECONDS))
        for _ in range(TURNS):
            for racer in racers:
                racer.turn(check)
    finally:
        for racer in racers:
            racer.close(check)
    for racer in racers:
        if racer.problem or not racer.ms:
            section.problems.append(f"{workload}, {racer.name}: {racer.problem or 'no steps'}")
    return [racer for racer in racers if racer.ms]


def speed(check: Check, section: Section, workload: str) -> None:
    """Tokens a second, share of the peak and memory, beside torch's."""
    _, wanted = TARGETS[workload]
    racers = race(check, section, workload)
    section.tables[f"{workload}: {TURNS} turns of {STEPS} steps each"] = [
        row(racer, workload) for racer in racers
    ]
    ours = next((racer for racer in racers if racer.name == "ours"), None)
    peer = next((racer for racer in racers if racer.name.startswith("torch")), None)
    found = "no steps" if ours is None else f"{ours.tokens_per_second:,.0f}"
    fast = ours is not None and ours.tokens_per_second >= wanted
    section.judge(f"{workload}, tokens per second", f"at least {wanted:,.0f}", found, fast)
    if check.torch_python is None:
        section.judge(f"{workload} beside torch", f"{AHEAD} x", "not run: no --torch-python", None)
        return
    if ours is None or peer is None:
        section.judge(f"{workload} beside torch", f"{AHEAD} x", "not both ran", False)
        return
    ratio = ours.tokens_per_second / peer.tokens_per_second
    section.judge(f"{workload} beside {peer.name}", f"at least {AHEAD} x", f"{ratio:.3f} x", ratio >= AHEAD)
    own, theirs = ((racer.end or {}).get("pool_mb") for racer in (ours, peer))
    shown = f"{own} and {theirs} MiB"
    fits = None if own is None or theirs is None else own <= theirs
    section.judge(f"{workload}, memory taken from the GPU", "not above torch's", shown, fits)


def row(racer: Racer, workload: str) -> dict[str, Any]:
    """One program's figures."""
    assert racer.start is not None
    tokens, size = racer.tokens_per_second, LARGE[workload]
    share = tokens * flop_of_a_token(racer.start["parameters"], size) / PEAK
    quarter = statistics.quantiles(racer.ms, n=4) if len(racer.ms) > 1 else racer.ms * 3
    figures = {"program": racer.name, "steps": len(racer.ms), "ms": statistics.median(racer.ms)}
    figures |= {
        "quartiles": f"{quarter[0]:.1f} to {quarter[2]:.1f}",
        "tokens/s": tokens,
        "share of peak": share,
    }
    return figures | {name: value for name, value in (racer.end or {}).items() if name.endswith("_mb")}


def gpt2(check: Check, section: Section) -> None:
    """GPT-2 124M at T 1024 in bf16, beside torch.compile, SDPA and fused AdamW."""
    speed(check, section, "gpt2-124m")


def llama(check: Check, section: Section) -> None:
    """The shape of Llama-3.2-1B at T 2048 in bf16, beside torch's FSDP2 on one GPU."""
    speed(check, section, "llama-1b")


def overhead(check: Check, section: Section) -> None:
    """How much of a step of 32k tokens no kernel runs, and a time line."""
    path = check.out / "timeline.json"
    program = Answerer(check.script("gpu_step.py", "--trace", str(path)), check.ready.env, ROOT)
    start = program.answer(check.left(90))
    found = program.ask(MEASURED, check.left(60)) if start else None
    if found is not None:
        program.ask(SHOWN, check.left(60))  # a time line that can be looked at
    _, outcome = program.close(check.left(20))
    check.log(program.job.command, outcome)
    if found is None:
        problem = outcome.problem
        torch = "No module named 'torch'" in problem
        section.judge("idle time of the GPU", f"under {MOST_IDLE:.0%}", "not seen", None if torch else False)
        section.problems += [] if torch else [problem]
        return
    section.tables[f"{MEASURED} steps of GPT-2 124M; {path.name} has {SHOWN} more"] = [found]
    shown = f"{found['idle']:.1%}, {found['kernels'] / MEASURED:.0f} kernels per step"
    section.judge("idle time of the GPU", f"under {MOST_IDLE:.0%}", shown, found["idle"] < MOST_IDLE)
