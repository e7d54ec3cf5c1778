#!/usr/bin/env python3
"""Run all tests: tests/serial, then tests/mpi and tests/gpu at each world size.

    python tests/run_sizes.py [--quick] [-n 1,2,3,4,8] [--lanes 4] [PATH...] [-- PYTEST OPTION...]

With --quick, as in `make test`, each test runs at one number of ranks, and tests marked `long` are left out:
see tests/conftest.py.

Each lane runs one part at a time. There are two more lanes than cores (at most eight), because tests wait a
third of their time. Parts with several ranks alternate with other parts, so that few of them run at once.
The files of tests/serial are divided among a dozen processes, so that each stays small: many tests fork. Each
part prints a line, the reasons for skips, its slowest tests, and the end of its output if it failed; the last
line is `N passed, N failed, N skipped`. The exit status is 0 only if every part completed, none failed, and a
test passed. A PATH under tests/serial, tests/mpi or tests/gpu runs that part only.

tests/gpu runs at up to three ranks on a simulated CuPy (tests/pretend), or with ZERO_MPI_TEST_GPU=1 on the
installed one.

$ZERO_MPI_JOB_TIMEOUT    seconds for one part, default 3600
$ZERO_MPI_SUITE_TIMEOUT  seconds for all parts together, default no limit
$ZERO_MPI_MPIEXEC        the launcher, default mpiexec
"""

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import jobs

ROOT = Path(__file__).resolve().parent.parent
SIZES = "1,2,3,4,8"
QUICK_SIZES = "1,2,3,4"  # no test needs more than four ranks, as conftest.py checks
WHOLE = ["tests/serial", "tests/mpi", "tests/gpu"]
GPU_SIZES = (1, 2, 3)  # few ranks, because simulated streams are threads
PRETEND = ROOT / "tests" / "pretend"
LANES = min(len(os.sched_getaffinity(0)) + 2, 8)
SERIAL_PARTS = 12
PYTEST = ["-m", "pytest", "-q", "-rfEsxX", "--color=no", "-p", "no:cacheprovider"]
PYTEST += ["--durations=5", "--durations-min=5"]
# Processes that clean up the same folder conflict, so each part has a folder, which is removed at its end.
PYTEST += ["-o", "tmp_path_retention_count=1000"]
SUMMARY = re.compile(r"=*\s*(\d+ [a-z]+(, \d+ [a-z]+)*|no tests ran) in [\d.]+s.*")
COUNT = re.compile(r"(\d+) ([a-z]+)")
WORTH_SAYING = re.compile(r"(FAILED|ERROR|SKIPPED|XFAIL|deselected) |\d+\.\d+s (call|setup|teardown) ")
Part = tuple[str, int, list[str]]  # name, ranks, paths
NOTHING_RAN = 5  # pytest's exit status if no test ran
NO_VERDICT = 97  # status of run_sizes.py for a part that ended without a summary
COUNTED_AS = {"passed": "passed", "xpassed": "passed", "failed": "failed", "error": "failed"}
COUNTED_AS |= {"errors": "failed", "skipped": "skipped", "xfailed": "skipped"}


@dataclass
class Verdict:
    status: int
    summary: str
    counts: Counter[str] = field(default_factory=Counter)


def read_verdict(status: int, output: str) -> Verdict:
    """Return the counts of a part; a part without exactly one summary counts as one failure."""
    summaries = [line.strip("= ") for line in output.splitlines() if SUMMARY.fullmatch(line.strip())]
    if len(summaries) != 1:
        text = "no summary" if not summaries else f"{len(summaries)} summaries"
        return Verdict(status or NO_VERDICT, text, Counter(failed=1))
    counts: Counter[str] = Counter()
    for count, kind in COUNT.findall(summaries[0].partition(" in ")[0]):
        counts[COUNTED_AS.get(kind, kind)] += int(count)
    if status == NOTHING_RAN and counts["deselected"]:  # all tests were left out by marks or options
        status = 0
    if status == 0 and counts["failed"]:
        status = NO_VERDICT
    if status != 0:
        counts["failed"] = max(counts["failed"], 1)
    return Verdict(status, summaries[0], counts)


def run_part(ranks: int, paths: list[str], options: list[str], timeout: float) -> tuple[int, str]:
    """Run pytest on `ranks` ranks, or without a launcher for 0. Return (exit status, output)."""
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
    with tempfile.TemporaryDirectory(prefix="zero_mpi-tests-", ignore_cleanup_errors=True) as place:
        env["PYTEST_DEBUG_TEMPROOT"] = place
        job = [*command, *paths, *options]
        status, output, _ = jobs.run_command(job, timeout=timeout, env=env, cwd=ROOT, merge=True)
    if status == jobs.TIMED_OUT:
        output += f"\nended after {timeout:.0f} s"
    return status, output


def print_part(name: str, verdict: Verdict, output: str, seconds: float) -> None:
    state = "ok" if verdict.status == 0 else f"FAILED (status {verdict.status})"
    print(f"[{name}] {state}: {verdict.summary} ({seconds:.0f} s with start)")
    for line in output.splitlines():
        if WORTH_SAYING.match(line):
            print(f"    {line}")
    if verdict.status != 0:
        print(output[-12000:])
    sys.stdout.flush()


def parts(sizes: list[int], paths: list[str]) -> list[Part]:
    serial = [path for path in paths if is_under("serial", path)]
    gpu = [path for path in paths if is_under("gpu", path)]
    parallel = [path for path in paths if path not in serial + gpu]
    single = [(name, 0, files) for name, files in share_out(serial)]
    many = [(plural(ranks), ranks, parallel) for ranks in sizes if parallel]
    many += [(f"gpu, {plural(ranks)}", ranks, gpu) for ranks in sizes if gpu and ranks in GPU_SIZES]
    return [part for both in zip_longest(single, many) for part in both if part is not None]


def share_out(paths: list[str]) -> list[tuple[str, list[str]]]:
    """Return at most `SERIAL_PARTS` named parts of the paths; a folder is replaced by its files."""
    files = []
    for path in paths:
        inside = sorted(str(file.relative_to(ROOT)) for file in (ROOT / path).glob("**/test_*.py"))
        files += inside or [path]
    groups = [files[first::SERIAL_PARTS] for first in range(min(SERIAL_PARTS, len(files)))]
    if len(groups) == 1:
        return [("serial", groups[0])]
    return [(f"serial, {part} of {len(groups)}", group) for part, group in enumerate(groups, 1)]


def plural(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def is_under(folder: str, path: str) -> bool:
    place = (ROOT / path.partition("::")[0]).resolve()
    return ROOT / "tests" / folder in (place, *place.parents)


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
    words, options = sys.argv[1:], []
    if "--" in words:
        cut = words.index("--")
        words, options = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", dest="sizes", help=f"world sizes, default {SIZES}, or {QUICK_SIZES}")
    parser.add_argument("--quick", action="store_true", help="leave out tests that add only more cases")
    parser.add_argument("--lanes", type=int, default=LANES, help=f"parts to run at a time, default {LANES}")
    parser.add_argument("paths", nargs="*")
    args = parser.parse_args(words)
    args.sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    return args, ["--quick"] * args.quick + options


def run_parts(
    queue: list[Part], lanes: int, options: list[str], limit: float, deadline: float
) -> Iterator[tuple[str, Verdict]]:
    def run(part: Part) -> tuple[str, Verdict, str, float]:
        name, ranks, paths = part
        start = time.monotonic()
        status, output = run_part(ranks, paths, options, min(limit, deadline - start))
        return name, read_verdict(status, output), output, time.monotonic() - start

    with ThreadPoolExecutor(lanes) as pool:
        for running in as_completed([pool.submit(run, part) for part in queue]):
            name, verdict, output, seconds = running.result()
            print_part(name, verdict, output, seconds)
            yield name, verdict


def count(verdicts: Iterator[tuple[str, Verdict]]) -> tuple[Counter[str], list[str]]:
    total: Counter[str] = Counter()
    failed = []
    for name, verdict in verdicts:
        total += verdict.counts
        if verdict.status != 0:
            failed.append(name)
    return total, failed


def close(total: Counter[str], failed: list[str]) -> int:
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if failed else 0


def compile_once() -> None:
    begin = "from zero_mpi import ops\nops.fill_cache(ops.GENERATION)\n"
    programs = (
        ({}, "import ml_dtypes\n" + begin + "ops.prepare(kind=ml_dtypes.bfloat16)"),
        ({"ZERO_MPI_BITS": "portable"}, begin + "ops.prepare()"),
    )

    def compiled(variables: dict[str, str], program: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", program]
        return jobs.run_command(command, timeout=600, env=jobs.COMPILED | variables, merge=True)

    with ThreadPoolExecutor(len(programs)) as pool:
        for status, output, _ in pool.map(compiled, *zip(*programs, strict=True)):
            if status:
                print(f"the operations cannot be compiled, so tests will fail:\n{output}", flush=True)


def main() -> int:
    args, options = read_arguments()
    print(f"MPI: {jobs.library()}", flush=True)
    if not args.paths:
        compile_once()
    sizes = [int(size) for size in args.sizes.split(",")]
    queue = parts(sizes, args.paths or WHOLE)
    limit = float(os.environ.get("ZERO_MPI_JOB_TIMEOUT", "3600"))
    deadline = time.monotonic() + float(os.environ.get("ZERO_MPI_SUITE_TIMEOUT", math.inf))
    total, failed = count(run_parts(queue, args.lanes, options, limit, deadline))
    if total["passed"] == 0 and not failed:
        failed.append("everything: nothing passed")
        total["failed"] = 1
    return close(total, failed)


if __name__ == "__main__":
    sys.exit(main())
