"""Counts the file calls that each rank makes for a checkpoint, on an assumed type of file system.

    mpirun -n 8 python benchmarks/checkpoint_calls.py --mb 64 --ranks-per-node 4 --system lustre

On a parallel file system, calls, locks and writers cost more than bytes. Calls can be counted without such a
system: `--system` makes zero_mpi treat the folder as part of one, and `--ranks-per-node` makes it treat
groups of ranks as nodes. The first save warms up, and the second is counted. `MB`: data written to files;
`kernel`: all writes of the process that the system counted, including writes to sockets.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from checkpoint import MB, make_state, model_of
from file_calls import FileCalls, kernel_writes

from zero_mpi import Comm, MPIComm, SerialComm
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.checkpoint.state import Description, TrainingProgress
from zero_mpi.cli.parser import Parser
from zero_mpi.errors import UsageError
from zero_mpi.files import file_systems
from zero_mpi.launch.world import World, run

PRETEND = "ZERO_MPI_RANKS_PER_NODE"
COLUMNS = ("open", "pwritev", "ftruncate", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "stat")
Line = tuple[int, int, dict[str, int], int, int]  # rank, node, calls, bytes, writes that the kernel counted


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="mpirun -n N python benchmarks/checkpoint_calls.py",
        description="Count the file calls of saving a checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mb", type=float, default=64, help="MB of state: parameters and two moments")
    add("--folder", default=".", help="folder for the temporary files, which are removed again")
    add("--system", help="file system to assume, such as lustre, instead of the folder's")
    add("--ranks-per-node", type=int, help="number of ranks that are treated as one node")
    add("--checkpoint-io", choices=("gather", "parallel"), default="parallel", help="as in zero_mpi.train")
    add("--writers-per-node", type=int, help="as in zero_mpi.train")
    return parser


def counted(comm: Comm, saver: Saver) -> list[Line]:
    """Save twice. Return, for each rank, a line with the counts of the second save. Collective."""
    saver.save(TrainingProgress(1))
    comm.barrier()
    before = kernel_writes()
    with FileCalls() as calls:
        saver.save(TrainingProgress(2))
    found = {name: calls.of(name) for name in COLUMNS}
    written, kernel = sum(calls.written.values()), kernel_writes() - before
    node = saver.writers.nodes[comm.rank]
    lines: list[Line] = comm.allgather_object((comm.rank, node, found, written, kernel))
    return lines


def table(lines: Sequence[Line]) -> list[str]:
    """Return the lines of the table: one for each rank, and one with the sums."""
    rows = [
        f"{'rank':>5}{'node':>5}" + "".join(f"{name:>10}" for name in COLUMNS) + f"{'MB':>9}{'kernel':>8}"
    ]
    for rank, node, calls, nbytes, kernel in lines:
        numbers = "".join(f"{calls[name]:10}" for name in COLUMNS)
        rows.append(f"{rank:5}{node:5}{numbers}{nbytes / MB:9.2f}{kernel:8}")
    sums = "".join(f"{sum(line[2][name] for line in lines):10}" for name in COLUMNS)
    nbytes, writes = sum(line[3] for line in lines), sum(line[2]["pwritev"] for line in lines)
    rows.append(f"{'all':>10}{sums}{nbytes / MB:9.2f}{sum(line[4] for line in lines):8}")
    return [*rows, f"{nbytes / MB / writes:.2f} MB per write"]


def pretend(system: str, folder: Path) -> None:
    """Make zero_mpi treat the folder as if it were on a file system of this type."""
    mounts = folder / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - {system} server rw\n")
    file_systems.MOUNTS = mounts


def command(world: World, arguments: Sequence[str]) -> int:
    """Count and print the table. Return the exit status."""
    options = make_parser().parse_args(arguments)
    if not (options.mb > 0 and Path(options.folder).is_dir()):
        raise UsageError("expected --mb above 0 and an existing --folder")
    if options.ranks_per_node:
        os.environ[PRETEND] = str(options.ranks_per_node)
    comm: Comm = SerialComm() if world.mpi is None else MPIComm()
    config = model_of(options.mb)
    optimizer = make_state(comm, config)
    description = Description(config.arch, config.metadata() | {"tokenizer.ggml.model": "none"}, {}, {})
    name = comm.broadcast_object(tempfile.mkdtemp(dir=options.folder) if comm.rank == 0 else None)
    try:
        if options.system and comm.rank == 0:  # rank 0 finds out the file system for all ranks
            pretend(options.system, Path(name))
        parallel = options.checkpoint_io == "parallel"
        how = {"keep": 1, "parallel": parallel, "writers_per_node": options.writers_per_node}
        saver = Saver(Path(name) / "out", optimizer, description, **how)
        lines = counted(comm, saver)
        if comm.rank == 0:
            tensors, about = len(optimizer.module.params), saver.writers.description
            nodes = len({line[1] for line in lines})
            print(f"2 files with {3 * tensors} tensors in total, {nodes} nodes: {about}")
            print("\n".join(table(lines)))
    finally:
        if comm.rank == 0:
            shutil.rmtree(name, ignore_errors=True)
    return 0


if __name__ == "__main__":
    run("benchmark", command, sys.argv[1:])
