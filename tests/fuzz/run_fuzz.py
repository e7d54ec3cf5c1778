"""Fuzz the commands with faulty files, which they must read or refuse in one line.

    python tests/fuzz/run_fuzz.py --seconds 600 [--only gguf,safetensors] [--seed 7]

Each `fuzz_*.py` in this folder has CASES: name -> function(random, folder) that writes files into an empty
folder and returns a command, e.g. ["-m", "zero_mpi", "inspect", "x.gguf"], which is run in that folder; a
case named "sound" changes nothing and must succeed. If a case writes `before.py`, the command's process runs
that first. No command may change files that a case puts into a folder `outside`. A failed case is kept with
its seed; `--only gguf.types --number 12 --seed 7` repeats it.

This process imports the package once. Making the files and running the command each happen in a forked
process, so that a run takes milliseconds and the system counts its time and memory separately.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from jobs import library  # noqa: E402

SETTINGS = {  # one process, one thread, no compiled operations (which take seconds to load)
    "ZERO_MPI_OPS": "reference",
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",  # the library tokenizers warns about threads after a fork
}
COMMANDS = ("train", "inspect", "export", "generate", "plan", "report", "trace", "evaluate", "samples")
COMMANDS += ("tokenize", "verify")

Case = Callable[[Random, Path], list[str]]

MOST_CPU = 5.0  # maximum CPU seconds of a run
OUT_OF_TIME = f"signal {int(signal.SIGXCPU)}"
MOST_WAIT = 40.0  # maximum wall-clock seconds of a run; generous, because machines are busy
MOST_GROWTH = 300 << 20  # maximum bytes of resident memory in addition to this process's
MOST_HELD = 2 << 30  # limit of a run's memory in bytes
RESERVED = 3 << 30  # address space that Intel MPI reserves at its start
MOST_WRITTEN = 256 << 20  # maximum bytes of each file that a run writes
MOST_MADE = 16 << 30  # maximum bytes of a sparse file that a case writes
LONGEST_LINE = 2000  # maximum number of characters of an error line, with its paths
SHOWN = 1 << 20  # maximum bytes of output that are checked
KEPT = 3  # maximum number of failures of each kind whose files are kept

FINE = {0, 2}
SOUND = "sound"  # a case of this name must succeed; the other cases change its files
ALSO_FINE = {"inspect": {1}, "doctor": {1}, "verify": {1, 3}}  # further allowed statuses: damage, difference
FAILS = {"train": {1}, "tokenize": {1}, "export": {1}}  # further statuses for failures of the machine
FREE_OUTPUT = {"generate"}  # commands that print text of a model, which may have any characters
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
KIND = re.compile(r"'?numpy\.\w+'?|[0-9]+")  # parts of a message that do not distinguish failures
WARNING = re.compile(r"^\S+:\d+: \w*Warning: ", re.MULTILINE)


@dataclass
class Ending:
    status: int | str
    printed: str
    said: str
    cpu: float
    wall: float
    growth: int


def problems(command: str, end: Ending) -> Iterator[str]:
    """Yield a line for each forbidden behaviour of a run."""
    if "Traceback (most recent call last)" in end.said + end.printed:
        last = [
            line for line in end.said.splitlines() if line and not line.startswith(("zero_mpi: ", "Abort("))
        ][-1:]
        yield f"traceback: {last[0][:200] if last else ''}"
    failed = end.status in FAILS.get(command, set())
    if end.status not in FINE | ALSO_FINE.get(command, set()) and not failed:
        yield f"status {end.status}"
    timeout = end.status == OUT_OF_TIME  # the kernel's CPU limit may come a second early
    if timeout or end.cpu > MOST_CPU:
        yield f"slow: {end.cpu:.1f} s of CPU time"
    if end.wall > MOST_WAIT:
        yield f"hang: {end.wall:.1f} s, {end.cpu:.1f} s of CPU time"
    if end.growth > MOST_GROWTH:
        yield f"memory: {end.growth >> 20} MiB more"
    if (end.status == 2 or failed) and (end.said.count("\n") != 1 or not end.said.endswith("\n")):
        yield f"{end.said.count(chr(10))} lines instead of one"
    if (longest := max(map(len, end.said.splitlines()), default=0)) > LONGEST_LINE:
        yield f"a line of {longest} characters"
    if match := CONTROL.search(end.said + ("" if command in FREE_OUTPUT else end.printed)):
        yield f"control character {match[0]!r}"
    if WARNING.search(end.said):
        yield "warning"


def run_in_child(action: Callable[[], None], folder: Path, output: Path, limit: int) -> Ending:
    """Run action() in a forked process in `folder`, with its output in files at `output`.

    `limit`: size limit in bytes of each file that the action writes.
    """
    before, start = resident(), time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            become_child(folder, output, limit)
            action()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except BaseException:
                    status = status or 1
            os._exit(status)
    code, usage = wait_for(pid, start)
    printed, errors = (text_of(output.with_suffix(suffix)) for suffix in (".out", ".err"))
    status = os.waitstatus_to_exitcode(code)
    growth = usage.ru_maxrss * 1024 - before
    wall = time.monotonic() - start
    cpu = usage.ru_utime + usage.ru_stime
    return Ending(status if status >= 0 else f"signal {-status}", printed, errors, cpu, wall, growth)


def become_child(folder: Path, output: Path, limit: int) -> None:
    """Start a session, set limits and redirect output to files."""
    os.setsid()
    os.chdir(folder)
    for number, path in ((1, output.with_suffix(".out")), (2, output.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    bound(resource.RLIMIT_DATA, data_size() + MOST_HELD + (RESERVED if uses_intel_mpi() else 0))
    bound(resource.RLIMIT_FSIZE, limit)
    bound(resource.RLIMIT_CORE, 0)
    bound(resource.RLIMIT_CPU, int(MOST_CPU) + 1)


def bound(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@functools.cache
def uses_intel_mpi() -> bool:
    return "Intel" in library()


def wait_for(pid: int, start: float) -> tuple[int, resource.struct_rusage]:
    """Wait for a child and kill its session when its time is up."""
    pause = 0.0005
    while True:
        child, code, usage = os.wait4(pid, os.WNOHANG)
        if child:
            return code, usage
        if time.monotonic() - start > MOST_WAIT + 1:
            os.killpg(pid, signal.SIGKILL)
            _, code, usage = os.wait4(pid, 0)
            return code, usage
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def data_size() -> int:
    return int(re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def text_of(path: Path) -> str:
    """Return the beginning of a child's output; bytes that are not UTF-8 become surrogates."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        text = file.read(SHOWN).decode("utf-8", "surrogateescape")
    return text.rstrip("".join(map(chr, range(0xDC80, 0xDD00)))) if path.stat().st_size > SHOWN else text


def run_command(args: list[str]) -> None:
    """Run `-m MODULE ...` or a script in this process."""
    if os.path.exists("before.py"):
        exec(Path("before.py").read_text(), {})
    if args[0] == "-m":
        sys.argv = [args[1], *args[2:]]
        runpy.run_module(args[1], run_name="__main__")
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")


def find_cases(only: str, folder: Path) -> dict[str, Case]:
    """Return MODULE.CASE -> function for a folder's cases, or for the named ones ("gguf", "gguf.types")."""
    table: dict[str, Case] = {}
    sys.path.insert(0, str(folder))
    names = [name for name in only.split(",") if name]
    kinds = {name.partition(".")[0] for name in names}
    for path in sorted(folder.glob("fuzz_*.py")):
        kind = path.stem.removeprefix("fuzz_")
        if not kinds or kind in kinds:  # some modules train a run at import
            cases = importlib.import_module(path.stem).CASES
            table |= {f"{kind}.{name}": case for name, case in cases.items()}
    selected = {
        name: case
        for name, case in table.items()
        if not names or any(name == prefix or name.startswith(f"{prefix}.") for prefix in names)
    }
    if not selected:
        raise SystemExit(f"--only {only}: no such case{': ' * bool(table)}{', '.join(table)}")
    return selected


@dataclass
class Fuzz:
    keep: Path
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)  # count by kind: traceback, hang, slow, memory, ...
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")

    def run(self, name: str, case: Case, number: int) -> list[str]:
        place = Path(tempfile.mkdtemp(prefix="fuzz-"))
        folder, label = place / "files", f"{name} --number {number}"
        folder.mkdir()
        try:
            args = self.made(name, case, number, place)
            if isinstance(args, Ending):
                return self.failed(label, place, ["the fuzzer itself failed"], args)
            before = contents(folder / "outside")
            end = run_in_child(lambda: run_command(args), folder, place / "run", MOST_WRITTEN)
            command = ""
            if args[0] == "-m":
                command = args[2] if args[1] == "zero_mpi" else args[1].rpartition(".")[2]
            self.outcomes[f"{name} {end.status}"] += 1
            self.slowest = max(self.slowest, (end.cpu, label))
            self.largest = max(self.largest, (end.growth, label))
            faults = list(problems(command, end))
            if contents(folder / "outside") != before:
                faults.append("changed: files in the folder outside")
            if name.endswith(f".{SOUND}") and end.status:
                faults.append(f"status {end.status} of a case that must succeed")
            return self.failed(label, place, faults, end) if faults else []
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def made(self, name: str, case: Case, number: int, place: Path) -> list[str] | Ending:
        """Write the files of a case in a separate process, so that its memory does not count."""

        def action() -> None:
            args = case(Random(f"{self.seed} {name} {number}"), place / "files")
            (place / "args.json").write_text(json.dumps(list(map(str, args))))

        end = run_in_child(action, place / "files", place / "make", MOST_MADE)
        return json.loads((place / "args.json").read_text()) if end.status == 0 else end

    def failed(self, label: str, place: Path, faults: list[str], end: Ending) -> list[str]:
        self.wrong.update(KIND.sub("N", fault).partition(":")[0] for fault in faults)
        kind = f"{label.split()[0]}: {KIND.sub('N', '; '.join(faults))}"
        self.failures[kind] += 1
        if self.failures[kind] > KEPT:
            return faults
        target = self.keep / f"{label.replace(' --number ', '-')}-seed-{self.seed}"
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(place, target)
        command = f"--seed {self.seed} --only {label}"
        print(f"FAILED {label}: {'; '.join(faults)}\n  again: {command}\n  files: {target}", flush=True)
        print("".join(f"  | {line}\n" for line in end.said.splitlines()[-4:]), end="", flush=True)
        return faults


def contents(folder: Path) -> dict[Path, bytes | str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()]
    return {path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}


def prepare() -> None:
    """Set the environment and import all commands before anything is forked, without starting MPI."""
    os.environ.update(SETTINGS)
    from zero_mpi.commands.main import module_of

    uses_intel_mpi()  # the result is cached, so forked processes need not ask again
    for name in COMMANDS:
        importlib.import_module(module_of(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="stop after this many seconds")
    parser.add_argument("--rounds", type=int, help="stop after each case has run this many times")
    parser.add_argument("--only", default="", help="modules or cases, e.g. gguf,toml.nesting")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="seed of all choices")
    parser.add_argument("--number", type=int, help="run only this number of each case")
    parser.add_argument("--keep", type=Path, help="folder for failed cases")
    parser.add_argument("--cases", type=Path, default=HERE, help="folder with fuzz_*.py")
    options = parser.parse_args()
    prepare()
    items = list(find_cases(options.only, options.cases.absolute()).items())
    cases = dict(Random(options.seed).sample(items, len(items)))  # in random order, since time may run out
    keep = options.keep or Path(tempfile.mkdtemp(prefix="fuzz-failures-"))
    fuzz, start = Fuzz(keep.absolute(), options.seed), time.monotonic()
    numbers = itertools.count() if options.rounds is None else iter(range(options.rounds))
    for number in numbers if options.number is None else [options.number]:
        for name, case in cases.items():
            if time.monotonic() - start > options.seconds:
                break
            fuzz.run(name, case, number)
        else:
            continue
        break
    report(fuzz, time.monotonic() - start)
    if not fuzz.failures and not options.keep:
        keep.rmdir()
    return 1 if fuzz.failures else 0


def report(fuzz: Fuzz, seconds: float) -> None:
    for outcome, count in sorted(fuzz.outcomes.items()):
        print(f"{count:7} {outcome}")
    print(f"slowest: {fuzz.slowest[0]:.2f} s, {fuzz.slowest[1]}")
    print(f"largest: {fuzz.largest[0] >> 20} MiB, {fuzz.largest[1]}")
    for kind, count in fuzz.failures.most_common():
        print(f"FAILED {count} times: {kind}")
    cases, total = {outcome.split()[0] for outcome in fuzz.outcomes}, sum(fuzz.outcomes.values())
    counts = dict.fromkeys(("traceback", "hang", "slow", "memory"), 0) | fuzz.wrong
    print(f"{len(cases)} cases: {', '.join(f'{count} {kind}' for kind, count in counts.items())}; limits:")
    print(f"{MOST_CPU:g} s of CPU time, {MOST_WAIT:g} s of wall-clock time, {MOST_GROWTH >> 20} MiB")
    print(f"{total} runs in {seconds:.0f} s, seed {fuzz.seed}, {sum(fuzz.failures.values())} failed")


if __name__ == "__main__":
    sys.exit(main())
