"""Times gathers and reductions of a unit: by our transports, by the MPI library, and as a copy in memory.

    mpirun -n 2 python benchmarks/collectives.py [--most-mb 256]

Prints one line per buffer size, in microseconds: the slowest rank's time, median over repeats. All ranks
start together. `copy` is a memcpy of the same number of bytes, on all ranks at once. With shared memory, a
gather copies nothing, so its time is only that of synchronizing all ranks.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from zero_mpi import Comm, Partition
from zero_mpi.cli.parser import Parser
from zero_mpi.launch.world import World, run

COLUMNS = {
    "copy": ("copy",),
    "all-gather": ("library", "mpi", "shared"),
    "reduce-scatter": ("library", "mpi fast", "mpi exact", "shared"),
    "all-reduce": ("library",),
}
QUANTUM = 256  # elements; small, so that every rank owns a part of the smallest buffer
FEWEST, MOST = 3, 200

Operation = Callable[[], object]


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="mpirun -n N python benchmarks/collectives.py",
        description="Time gathers and reductions of a unit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--least-kb", type=int, default=1)
    parser.add_argument("--most-mb", type=int, default=256)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of repeats for each measurement")
    return parser


def sizes(options: argparse.Namespace) -> Iterator[int]:
    """Yield the buffer sizes in bytes. Each size is four times the one before."""
    size = options.least_kb << 10
    while size <= options.most_mb << 20:
        yield size
        size *= 4


def library(raw: object, partition: Partition, rank: int) -> dict[str, Operation]:
    """Return name -> operation for the blocking collectives of the MPI library, and for a copy in memory."""
    from mpi4py import MPI

    whole, other = (np.ones(partition.length, np.float32) for _ in range(2))
    own = np.empty(partition.counts[rank], np.float32)
    places = [whole, partition.counts, partition.bounds[:-1], MPI.FLOAT]
    return {
        "all-gather library": lambda: raw.Allgatherv(MPI.IN_PLACE, places),
        "reduce-scatter library": lambda: raw.Reduce_scatter(whole, own, partition.counts),
        "all-reduce library": lambda: raw.Allreduce(MPI.IN_PLACE, whole),
        "copy copy": lambda: np.copyto(other, whole),
    }


def messages(comms: dict[str, Comm], partition: Partition) -> dict[str, Operation]:
    """Return name -> operation for our transport over messages."""
    comm = comms["exact"]
    whole, own = np.ones(partition.length, np.float32), np.zeros(partition.counts[comm.rank], np.float32)

    def reduce(kind: str) -> Operation:
        return lambda: comms[kind].reduce_scatter(whole, own, partition).wait()

    return {
        "all-gather mpi": lambda: comm.allgather(None, whole, partition).wait(),
        "reduce-scatter mpi fast": reduce("fast"),
        "reduce-scatter mpi exact": reduce("exact"),
    }


def shared(comm: Comm | None, partition: Partition) -> dict[str, Operation]:
    """Return name -> operation for our transport over shared memory; {} if there is too little of it."""
    from zero_mpi.comm.shared.memory import NoSharedMemory

    if comm is None:
        return {}
    try:
        memory = comm.memory([partition], [partition.length])
    except NoSharedMemory:
        return {}
    pool, own = memory.buffers, np.zeros(partition.counts[comm.rank], np.float32)
    slot, whole = pool.take(partition.length), memory.full[0]
    slot.fill(1)

    def gather() -> None:
        assert whole is not None
        comm.signal_written()
        comm.wait_written()

    def reduce() -> None:
        assert len(pool._lent) == 1  # a buffer is reduced in place only if it is a lent slot of a pool
        comm.reduce_scatter(slot, own, partition).wait()

    return {"all-gather shared": gather, "reduce-scatter shared": reduce}


def measure(comm: Comm, operation: Operation, budget: float) -> float:
    """Time an operation for about `budget` seconds. Return the slowest rank's median in microseconds."""
    seconds: list[float] = []
    repeats = FEWEST
    while len(seconds) < repeats:
        comm.barrier()
        begun = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - begun)
        if len(seconds) == FEWEST:  # the first repeats are warm-up
            longest = max(comm.allgather_object(min(seconds)))
            repeats = FEWEST + int(min(MOST, max(FEWEST, budget / longest)))
    of_all = comm.allgather_object(seconds[FEWEST:])
    return 1e6 * statistics.median(max(together) for together in zip(*of_all, strict=True))


def make_comms() -> tuple[dict[str, Comm], Comm | None]:
    """Return (reduction -> communicator over messages, communicator over shared memory or None)."""
    from zero_mpi.comm.mpi import MPIComm
    from zero_mpi.comm.shared.comm import SharedComm
    from zero_mpi.comm.shared.memory import NoSharedMemory

    comms: dict[str, Comm] = {kind: MPIComm(exact=kind == "exact") for kind in ("exact", "fast")}
    try:
        return comms, SharedComm()
    except NoSharedMemory:
        return comms, None


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure and print the table."""
    options = world.run_on_all(lambda: make_parser().parse_args(arguments))
    if world.mpi is None:
        raise SystemExit("there is nothing to measure in one process; start this with mpirun -n 2 or more")
    comms, node = make_comms()
    names = [f"{kind} {name}" for kind, ways in COLUMNS.items() for name in ways]
    if world.rank == 0:
        print(
            f"{world.size} ranks, microseconds; {world.mpi.Get_library_version().split(chr(10))[0].strip()}"
        )
        print(f"{'':8}" + "".join(f"{kind:>{11 * len(ways)}}" for kind, ways in COLUMNS.items()))
        print(f"{'KB':>8}" + "".join(f"{name:>11}" for ways in COLUMNS.values() for name in ways))
    for size in sizes(options):
        partition = Partition(size // 4, world.size, min(QUANTUM, max(1, size // 4 // world.size)))
        operations = library(world.mpi.COMM_WORLD, partition, world.rank)
        operations |= messages(comms, partition) | shared(node, partition)
        found = {
            name: measure(comms["exact"], operations[name], options.budget)
            for name in names
            if name in operations
        }
        if world.rank == 0:
            columns = (f"{found[name]:11.0f}" if name in found else f"{'-':>11}" for name in names)
            print(f"{size >> 10:8}" + "".join(columns), flush=True)
    return 0


if __name__ == "__main__":
    run("collectives", command, sys.argv[1:])
