#!/usr/bin/env python3
"""Run the whole suite: tests/serial in one process, then tests/mpi and tests/gpu at each world size.

    python tests/run_sizes.py [-n 1,2,3,4,8] [PATH...] [-- PYTEST OPTION...]

A line for each part with the reasons of its skips, the end of its output where it failed, and one last
line `N passed, N failed, N skipped`. The exit status is 0 only if every part ran to its end, none
failed, and something passed. A PATH under tests/serial, tests/mpi or tests/gpu runs that part only.

tests/gpu runs on a CuPy without a GPU (tests/pretend), at up to three ranks; with ZERO_MPI_TEST_GPU=1 on the
one that is installed.

$ZERO_MPI_JOB_TIMEOUT    seconds for one part, default 1500
$ZERO_MPI_SUITE_TIMEOUT  seconds for all parts together, default no limit
$ZERO_MPI_MPIEXEC        the launcher, default mpiexec
"""

import argparse
import math
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jobs

ROOT = Path(__file__).resolve().parent.parent
SIZES = "1,2,3,4,8"
MOST_GPU_RANKS = 3  # pretend streams are threads
PRETEND = ROOT / "tests" / "pretend"
PYTEST = ["-m", "pytest", "-q", "-rfEsxX", "--color=no", "-p", "no:cacheprovider"]
SUMMARY = re.compile(r"=*\s*(\d+ [a-z]+(, \d+ [a-z]+)*|no tests ran) in [\d.]+s.*")
COUNT = re.compile(r"(\d+) ([a-z]+)")
NOTHING_RAN = 5  # pytest's status
NO_VERDICT = 97  # ours: an end without a summary
COUNTED_AS = {
    "passed": "passed",
    "xpassed": "passed",
    "failed": "failed",
    "error": "failed",
    "errors": "failed",
    "skipped": "skipped",
    "xfailed": "skipped",
}


@dataclass
class Verdict:
    """What a part's exit status and output amount to."""

    status: int
    summary: str
    counts: Counter[str] = field(default_factory=Counter)


def read_verdict(status: int, output: str) -> Verdict:
    """The verdict of a part. No summary, or one from each rank, is none; a failure counts at least one."""
    summaries = [line.strip("= ") for line in output.splitlines() if SUMMARY.fullmatch(line.strip())]
    if len(summaries) != 1:
        found = "no summary" if not summaries else f"{len(summaries)} summaries"
        return Verdict(status or NO_VERDICT, found, Counter(failed=1))
    counts: Counter[str] = Counter()
    for count, kind in COUNT.findall(summaries[0].partition(" in ")[0]):
        counts[COUNTED_AS.get(kind, kind)] += int(count)
    if status == NOTHING_RAN and counts["deselected"]:  # by the marks or options, which leave a trace
        status = 0
    if status == 0 and counts["failed"]:
        status = NO_VERDICT
    if status != 0:
        counts["failed"] = max(counts["failed"], 1)
    return Verdict(status, summaries[0], counts)


def run_part(ranks: int, paths: list[str], options: list[str], timeout: float) -> tuple[int, str]:
    """Run pytest on `ranks` ranks, or without a launcher for 0. Returns (exit status, output)."""
    command = [sys.executable, *PYTEST]
    if ranks > 0:
        command = [*jobs.launcher(), "-n", str(ranks), *command, "--with-mpi"]
    if timeout <= 0:
        return jobs.TIMED_OUT, "no time left: see ZERO_MPI_SUITE_TIMEOUT"
    env = {"ZERO_MPI_OPS": os.environ.get("ZERO_MPI_OPS", "auto")}
    if any(is_under("gpu", path) for path in paths) and os.environ.get("ZERO_MPI_TEST_GPU") != "1":
        env["PYTHONPATH"] = os.pathsep.join([str(PRETEND), os.environ.get("PYTHONPATH", "")]).strip(
            os.pathsep
        )
    status, output, _ = jobs.run_command(
        [*command, *paths, *options], timeout=timeout, env=env, cwd=ROOT, merge=True
    )
    if status == jobs.TIMED_OUT:
        output += f"\nended after {timeout:.0f} s"
    return status, output


def print_part(name: str, verdict: Verdict, output: str, seconds: float) -> None:
    """One line, what did not run and why, and the end of the output of a failure."""
    state = "ok" if verdict.status == 0 else f"FAILED (status {verdict.status})"
    print(f"[{name}] {state}: {verdict.summary} ({seconds:.0f} s with start)")
    for line in output.splitlines():
        if line.startswith(("SKIPPED ", "XFAIL ", "deselected ")):
            print(f"    {line}")
    if verdict.status != 0:
        print(output[-12000:])
    sys.stdout.flush()


def parts(sizes: list[int], paths: list[str]) -> list[tuple[str, int, list[str]]]:
    """(name, ranks, paths) of each part; 0 ranks stand for one process without a launcher."""
    serial = [path for path in paths if is_under("serial", path)]
    gpu = [path for path in paths if is_under("gpu", path)]
    parallel = [path for path in paths if path not in serial + gpu]
    found = [("serial", 0, serial)] if serial else []
    found += [(plural(ranks), ranks, parallel) for ranks in sizes if parallel]
    return found + [
        (f"gpu, {plural(ranks)}", ranks, gpu) for ranks in sizes if gpu and ranks <= MOST_GPU_RANKS
    ]


def plural(ranks: int) -> str:
    """A number of ranks for people."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def is_under(folder: str, path: str) -> bool:
    """Whether a path (or a pytest node id) is of one of the folders of tests."""
    return ROOT / "tests" / folder in within(path)


def within(path: str) -> list[Path]:
    """The folders that a path (or a pytest node id) lies in, and itself."""
    place = (ROOT / path.partition("::")[0]).resolve()
    return [place, *place.parents]


def read_arguments() -> tuple[list[int], list[str], list[str]]:
    """(world sizes, paths, pytest options) of the command line."""
    own, options = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, options = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", dest="sizes", default=SIZES, help=f"world sizes, default {SIZES}")
    parser.add_argument("paths", nargs="*", default=["tests/serial", "tests/mpi", "tests/gpu"])
    args = parser.parse_args(own)
    return [int(size) for size in args.sizes.split(",")], args.paths, options


def main() -> int:
    """Run the parts one after another; returns the exit status."""
    sizes, paths, options = read_arguments()
    limit = float(os.environ.get("ZERO_MPI_JOB_TIMEOUT", "1500"))
    deadline = time.monotonic() + float(os.environ.get("ZERO_MPI_SUITE_TIMEOUT", math.inf))
    total: Counter[str] = Counter()
    failed = []
    for name, ranks, part_paths in parts(sizes, paths):
        start = time.monotonic()
        status, output = run_part(ranks, part_paths, options, min(limit, deadline - start))
        verdict = read_verdict(status, output)
        print_part(name, verdict, output, time.monotonic() - start)
        total += verdict.counts
        if verdict.status != 0:
            failed.append(name)
    if total["passed"] == 0 and not failed:
        failed.append("everything: nothing passed")
        total["failed"] = 1
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
