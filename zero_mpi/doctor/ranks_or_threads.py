"""Whether a host trains faster with a rank a core or with fewer ranks of several threads, by trying both.

A small model takes steps on the ranks of a host, a thread each; then on every n-th rank, with n threads on
the cores of n ranks and with their sequences, while the others sleep. What ranks send one another is not in
it: with fewer ranks there is less of that.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from zero_mpi import ops
from zero_mpi.cli.text import plural
from zero_mpi.comm.serial import SerialComm
from zero_mpi.doctor.compute import calls_a_second
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import Row, assessed
from zero_mpi.models import ARCHITECTURES
from zero_mpi.nn import CrossEntropy
from zero_mpi.sharding import ShardedModule
from zero_mpi.sharding.grad_accum import GradAccum
from zero_mpi.sharding.optimizer import ShardedAdamW

SIZES = {"vocab_size": 256, "dim": 384, "layers": 2, "heads": 6, "context": 256}
SEQUENCES = 2  # a thread
BETTER = 1.05  # times as fast: less is noise
DOMAINS = Path("/sys/devices/system/node")


def small_run(sequences: int) -> Callable[[], None]:
    """A step of a small model in this process alone: forward, backward and update."""
    module = ShardedModule(ARCHITECTURES["llama"].from_flags(SIZES).stages(), SerialComm())
    module.initialize(seed=0)
    accumulator, optimizer = GradAccum(module, 1), ShardedAdamW(module, lr=1e-4)
    tokens = np.arange(sequences * SIZES["context"]).reshape(sequences, -1) % SIZES["vocab_size"]

    def step() -> None:
        accumulator.accumulate(tokens, CrossEntropy(tokens, 1 / tokens.size))
        accumulator.total_loss()
        optimizer.step(max_norm=1.0)

    return step


def domains(place: Path = DOMAINS) -> int:
    """Parts of this host with memory of their own (NUMA), at least 1."""
    return max(1, len(list(place.glob("node[0-9]*"))))


def choices(ranks: int, cores: int, parts: int) -> list[int]:
    """Threads a rank to try beside one: for a rank a host, and for one a part of its memory."""
    if not 1 < ranks <= cores:
        return []
    each = [ranks // parts] if parts > 1 and ranks % parts == 0 else []
    return [threads for threads in (*each, ranks) if threads > 1]


def tokens_per_second(where: Ranks, threads: int, cores: Sequence[set[int]], seconds: float) -> float:
    """Of this rank with threads, 0 if it sleeps meanwhile; `cores`: of its host's ranks. Collective."""
    first = where.place
    works = first % threads == 0 and first + threads <= len(cores)
    own, sequences, step = os.sched_getaffinity(0), threads * SEQUENCES, None
    if works:
        os.sched_setaffinity(0, set().union(*cores[first : first + threads]))
        ops.use_threads(threads)
        step = small_run(sequences)
        step()  # compiles, and allocates
    where.comm.barrier()
    if step is None:
        time.sleep(seconds)
    found = sequences * SIZES["context"] * calls_a_second(seconds, step) if step else 0.0
    where.comm.barrier()
    os.sched_setaffinity(0, own)
    ops.use_threads()
    return found


def row(rates: dict[int, float], ranks: int) -> list[Row]:
    """The row of a host of so many ranks: tokens a second of all together, by threads a rank."""
    if len(rates) < 2:
        return []
    best = max(rates, key=rates.__getitem__)
    said = [f"{layout(ranks, threads)} {rate / rates[1]:.2f}" for threads, rate in rates.items()]
    value = f"{', '.join(said)} (speed of a small model, without transfers)"
    remedy = f"start {layout(ranks, best)} with --threads {best}; the last bits are others than with 1"
    return [assessed("ranks or threads", value, best == 1 or rates[best] < BETTER * rates[1], remedy)]


def layout(ranks: int, threads: int) -> str:
    """Ranks of a host and their threads, for people."""
    return f"{plural(ranks // threads, 'rank')} x {plural(threads, 'thread')}"


def section(where: Ranks, seconds: float, figures: dict[str, object]) -> list[Row]:
    """Try it on all hosts at once, tell of the first; notes `tokens_per_second_by_threads`. Collective."""
    seats, first = where.gather((os.sched_getaffinity(0), domains())), where.nodes[0]
    mine = [seats[rank][0] for rank in where.nodes[where.node]]
    cores = set().union(*(seats[rank][0] for rank in first))
    rates: dict[int, float] = {}
    if tried := choices(len(first), len(cores), seats[first[0]][1]):
        for threads in (1, *tried):
            found = where.gather(tokens_per_second(where, threads, mine, seconds))
            rates[threads] = math.fsum(found[rank] for rank in first)
    figures["tokens_per_second_by_threads"] = {str(threads): rate for threads, rate in rates.items()}
    return row(rates, len(first))
