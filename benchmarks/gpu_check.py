"""Everything that needs a GPU, in one call of less than ten minutes, with a report.

    python3 benchmarks/gpu_check.py --out REPORT --venv /tmp/zero_mpi --torch-python python3

Parts run one after the other in programs of their own, the most important first, each with a limit of time,
so that none can end the rest; after each the report (`report.md`, `report.json`) is written again, and
`programs.log` has all that was said. Exit status: 0 if everything is as it should be, 1 if not (also where
something was not run), 2 with one line where there is no GPU or something is missing. `--pretend` tries
the script itself on the CuPy of tests/pretend.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # wherever it is started from

import gpu_parts
import gpu_speed
from gpu_parts import Check
from gpu_report import Report, Section
from gpu_setup import NotReady, Ready, make_pretend, make_ready

LIMIT = 570.0  # seconds in all
LEAST = 5.0  # seconds without which a part is not begun
BAD_USAGE = 2


@dataclass(frozen=True)
class Part:
    """A name, what does it, and whether it makes sense without a GPU."""

    name: str
    do: Callable[[Check, Section], None]
    pretends: bool = False


PARTS = (
    Part("machine", gpu_parts.machine, True),
    Part("first", gpu_speed.first, True),
    Part("ranks", gpu_parts.ranks, True),
    Part("gpt2", gpu_speed.gpt2),
    Part("tests", gpu_parts.tests, True),
    Part("llama", gpu_speed.llama),
    Part("losses", gpu_parts.losses, True),
    Part("overhead", gpu_speed.overhead),
)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about, allow_abbrev=False)
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder of the report ($OUT)")
    parser.add_argument("--venv", type=Path, help="make an environment there with what is missing here")
    parser.add_argument("--wheels", type=Path, help="install from this folder, not from a package index")
    parser.add_argument("--torch-python", help="interpreter that has torch, for the comparison")
    parser.add_argument("--mpi-root", type=Path, help="a CUDA-aware Open MPI: its folder, or an archive")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="only these, in this order")
    parser.add_argument("--tests", nargs="+", default=["tests/gpu"], help="for the part of that name")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="for the part of that name")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds in all")
    parser.add_argument("--pretend", action="store_true", help="without a GPU, on the pretend CuPy")
    return parser


def carry_out(check: Check, report: Report, parts: Sequence[Part]) -> None:
    """One part after the other; the report is written after each."""
    if any(part.name == "losses" for part in parts):
        gpu_parts.start_losses_of_cpu(check)
    try:
        for part in parts:
            section = Section(part.name, (part.do.__doc__ or "").strip())
            report.sections.append(section)
            begun = time.monotonic()
            if check.left(LEAST) < LEAST:
                section.not_run("no time was left")
            else:
                attempt(part, check, section)
            section.seconds = time.monotonic() - begun
            report.write(check.out)
            tell(section)
    finally:
        for job in check.background.values():
            job.end()


def attempt(part: Part, check: Check, section: Section) -> None:
    """A part; what goes wrong in this script itself ends no other part."""
    try:
        part.do(check, section)
    except Exception as error:
        section.problems.append(f"{type(error).__name__}: {error}")


def tell(section: Section) -> None:
    """A part's verdicts, for who watches."""
    print(f"[{section.name}] {section.state} ({section.seconds:.0f} s)", flush=True)
    for verdict in section.verdicts:
        mark = {True: "ok    ", False: "FAILED", None: "-     "}[verdict.ok]
        print(f"  {mark} {verdict.what}: {verdict.found} (wanted: {verdict.wanted})", flush=True)
    for problem in section.problems:
        print(f"  {problem}", flush=True)


def prepare(options: argparse.Namespace, scratch: Path) -> Ready:
    """The interpreter and its environment. Raises NotReady."""
    if options.out is None:
        raise NotReady("--out DIR: where is the report to go?")
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
    """Returns the exit status."""
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
        report = Report(title, [f"made ready in {time.monotonic() - begun:.0f} s", *ready.notes])
        (check.out / "programs.log").write_text("")
        chosen = {part.name: part for part in PARTS if part.pretends or not options.pretend}
        carry_out(check, report, [chosen[name] for name in options.parts if name in chosen])
    print(f"{'everything is as it should be' if report.passed else 'not everything passed'}: {options.out}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
