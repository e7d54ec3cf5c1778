"""Measurements of the doctor: the run folder, matrix products on each rank, messages between ranks.

Rank 0 saves small test checkpoints in the run folder, and every host checks that it sees the last. Matrix
products use the matmul of the models, on all ranks at once. A small and a large message pass around rings of
ranks, all rings at once: one ring per node, and between the nodes one ring for each rank index on a node. A
time is the median over repeats; a repeat takes as long as its slowest rank.
"""

import contextlib
import errno
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import ops
from zero_mpi.checkpoint import folders
from zero_mpi.cli.text import few, seconds, size
from zero_mpi.commands.doctor.ranks import BAD, Ranks, Row, judgement
from zero_mpi.files.file_systems import UNKNOWN, FileSystem, file_system
from zero_mpi.launch.ending import say
from zero_mpi.ops.low_precision import BFLOAT16

TRIAL, BLOCK = 16 << 20, 1 << 20  # bytes that the disk test writes and flushes; bytes per write call
LONGEST = 5.0  # seconds after which the disk test stops writing
PATIENCE, POLL = 3.0, 0.05  # seconds within which a host must see a file; seconds between checks
SLOW = 20e6  # bytes per second; a disk that writes less is slow
LITTLE = 1 << 30  # bytes; if less is free on the disk, the row is a note
BYTES_A_PARAMETER = 12  # bytes per parameter in a checkpoint
EDGE = 384  # rows and columns of the matrices, as wide as a small model; each matrix has 0.6 MB
BEHIND = 0.8  # a host is slow if its rate is below this fraction of the median
PRODUCTS, MESSAGES = (0.5, 0.2), (0.2, 0.02)  # seconds of a measurement, without and with --quick
SMALL = 64  # bytes of the message that measures latency
LARGE = 16 << 20, 1 << 20  # bytes of the message that measures bandwidth, without and with --quick
FEWEST, MOST = 3, 60  # minimum and maximum number of repeats
SLOW_LINK, LATE = 125e6, 1e-3  # a link is slow below these bytes/s (1 Gbit/s) or above these seconds
NAME_IT = (
    "if the hosts have a faster network, select its interface: MPICH -iface NAME or UCX_NET_DEVICES, Open "
    "MPI --mca btl_tcp_if_include NAME; otherwise train with large batches"
)

# --------------------------------------------------------------------------------------------- run folder


@dataclass
class Trial:
    """Results of rank 0's test. `problem`: why saving fails; `new_folders`: created folders to remove."""

    system: FileSystem = UNKNOWN
    free: int = 0
    written: int = 0  # bytes flushed to disk; less than TRIAL if writing took too long
    synced: float = 0.0  # seconds until `written` bytes were on disk
    problem: str = ""
    folder: Path | None = None
    new_folders: list[Path] = field(default_factory=list)


def run_folder(job: Ranks) -> list[Row]:
    """Test the run folder on all hosts and return rows on it. Collective."""
    out = Path(job.options.out)
    trial: Trial = job.world.comm.broadcast_object(try_folder(out) if job.world.rank == 0 else None)
    checks = job.of_nodes(lambda: trial.folder is None or bool(trial.problem) or sees(trial.folder))
    if job.world.rank == 0:
        if trial.folder is not None:
            shutil.rmtree(trial.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder stays if another program has put files there
            for folder in trial.new_folders:
                folder.rmdir()
    return list(folder_rows(out, trial, [name for ok, name in job.named(checks) if not ok]))


def try_folder(out: Path) -> Trial:
    """Test the run folder on rank 0 and return the results. The caller removes the test folder."""
    trial = Trial()
    try:
        trial.new_folders += [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        trial.system, trial.free = file_system(out), shutil.disk_usage(out).free
        folder = out / f".doctor-{os.getpid()}-{time.time_ns()}"
        folder.mkdir()
        trial.folder = folder
        data, start = os.urandom(BLOCK), time.perf_counter()
        with open(folder / "bytes", "wb", buffering=0) as file:
            while trial.written < TRIAL and time.perf_counter() - start < LONGEST:
                trial.written += file.write(data)
            os.fsync(file.fileno())
        trial.synced = time.perf_counter() - start
        for text in ("first", "second"):  # two checkpoints of one step; the second must replace the first
            new = folders.begin(folders.step_folder(folder, 1))
            (new / folders.MODEL).write_text(text)
            folders.publish(folder, 1, new, keep=1)
        if (folder / folders.LATEST / folders.MODEL).read_text() != "second":
            raise OSError(
                errno.EIO, f"a rename is not visible: `{folders.LATEST}` shows the first of two files"
            )
    except OSError as error:
        trial.problem = f"{error.filename or out}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            trial.free = 0
    return trial


def sees(folder: Path) -> bool:
    """Return whether this host sees rank 0's checkpoint within PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError):
            return (folder / folders.LATEST / folders.MODEL).read_text() == "second"
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)


def folder_rows(out: Path, trial: Trial, blind: list[str]) -> Iterator[Row]:
    """Yield the rows on the run folder. `blind`: names of the hosts that do not see the checkpoint."""
    if trial.problem:
        full = trial.free == 0 and trial.folder is not None
        remedy = f"{'free some space' if full else 'make it writable'}, or use another folder: --out DIR"
        yield Row("run folder", f"{out}: a run cannot save checkpoints there: {trial.problem}", BAD, remedy)
        return
    models, free = trial.free / BYTES_A_PARAMETER / 1e6, size(trial.free)
    value = f"{out} on {trial.system.kind}, {free} free: enough to save {models:,.0f} million parameters"
    remedy = "free some space: a checkpoint takes 12 bytes per parameter, and a run keeps 3 (--keep)"
    if not trial.system.is_lasting:
        remedy = "this folder is in the host's memory and is lost at a restart: use one on disk, --out DIR"
    yield judgement("run folder", value, trial.free >= LITTLE and trial.system.is_lasting, remedy)
    rate = trial.written / max(trial.synced, 1e-9)
    value = f"{size(trial.written)} written to disk in {seconds(trial.synced)}, {size(rate)}/s"
    remedy = "train with --async-save, save less often, or use a faster file system"
    yield judgement("disk", value, rate >= SLOW, remedy)
    value = "each host sees a checkpoint of rank 0"
    if blind:
        value = f"{', '.join(few(blind))} cannot see files that rank 0 writes to {out}"
    common = "use a file system that all hosts mount at the same path: --out DIR"
    yield judgement("seen by all hosts", value, not blind, common, BAD)


# ----------------------------------------------------------------------------------------------- products


def square_product(kind: Any) -> Callable[[], object]:
    """Return a function that multiplies two matrices with EDGE rows and columns, as layers do."""
    a, b = (np.random.default_rng(seed).random((EDGE, EDGE), np.float32).astype(kind) for seed in (1, 2))
    out = np.zeros_like(a)
    return lambda: ops.linear_backward_x(a, b, out)


def rate(seconds: float, product: Callable[[], object]) -> float:
    """Compute products for `seconds`, but at least one product. Return this rank's FLOP per second."""
    product()  # starts the library's threads
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < seconds:
        product()
        count += 1
    return 2.0 * EDGE**3 * count / (time.perf_counter() - start)


def products(job: Ranks) -> Iterator[Row]:
    """Measure products on all ranks at once; store the median and the lowest rate. Collective."""
    job.world.node_by_node(lambda: ops.prepare(say if job.world.rank == 0 else None))
    job.comm.barrier()
    rates = job.gather(rate(PRODUCTS[job.options.quick], square_product(np.float32)))
    job.figures["flops_per_second_per_rank"] = statistics.median(rates)
    job.figures["flops_per_second_slowest_rank"] = min(rates)
    return rate_rows(rates, job)


def rate_rows(rates: list[float], job: Ranks) -> Iterator[Row]:
    """Yield rows on the rates and on slow hosts. With two hosts, the faster host's rate is the median."""
    spread = " to ".join(dict.fromkeys((gigaflops(min(rates)), gigaflops(max(rates)))))
    total = f"{gigaflops(sum(rates))} in total (fp32 matmuls, all ranks at once)"
    yield Row("speed", f"{spread} GFLOP/s per rank, {total}")
    hosts = [statistics.mean(rates[rank] for rank in ranks) for ranks in job.nodes]
    if len(hosts) == 1:
        return
    shares = [100 * host / statistics.median_high(hosts) for host in hosts]
    slow = [f"{name} at {x:.0f} % of the median" for x, name in job.named(shares) if x < 100 * BEHIND]
    value = f"the slowest has {min(shares):.0f} % of the median"
    if slow:
        value = f"{', '.join(few(slow))}: all ranks wait for the slowest host"
    remedy = "exclude it from the job, or check it for other programs (top), heat and a lower clock"
    yield judgement("uneven hosts", value, not slow, remedy)


def gigaflops(flops: float) -> str:
    """Return a rate in FLOP per second as text in GFLOP/s."""
    return f"{flops / 1e9:.{0 if flops >= 1e10 else 1}f}"


def low_precision(job: Ranks) -> Iterator[Row]:
    """Measure bfloat16 products on all ranks at once and compare them with float32. Collective."""
    library, reason = ops.products(BFLOAT16)
    job.comm.barrier()
    rates = job.gather(rate(PRODUCTS[job.options.quick], square_product(BFLOAT16)) if library else 0.0)
    median = job.figures["bf16_flops_per_second_per_rank"] = statistics.median(rates)
    value = f"--precision bf16 would be slower than fp32: {reason or 'some ranks have no library'}"
    if min(rates):
        ratio = median / job.figures["flops_per_second_per_rank"]
        value = f"{library}: {gigaflops(median)} GFLOP/s per rank, {ratio:.1f} times fp32"
    yield Row("bf16", value)


# ----------------------------------------------------------------------------------------------- messages


def across(job: Ranks) -> tuple[list[int], int]:
    """Return this rank's ring (one rank per node; [] if a node has too few ranks) and the number of rings."""
    rings = min(map(len, job.nodes))
    return [ranks[job.place] for ranks in job.nodes] if job.place < rings else [], rings


def links(job: Ranks) -> Iterator[Row]:
    """Measure all links; store the results as `links`. Collective."""
    links = job.figures["links"] = dict[str, Any](node=None, between=None)
    if len(job.nodes) < job.world.size:
        links["node"] = measure(job, job.nodes[job.node], 1)
        yield Row("link in a node", text_of(links["node"]))
    if len(job.nodes) > 1:
        links["between"] = measure(job, *across(job))
        yield network(links["between"])
    if job.world.size == 1:
        yield Row("links", "not measured: only one rank")


def measure(job: Ranks, ring: Sequence[int], rings: int) -> dict[str, float]:
    """Measure a link. Return the link's seconds per message and seconds per byte. Collective.

    `ring`: ranks that pass a message on, or [] if this rank does not; `rings`: number of rings on the link.
    """
    large = LARGE[job.options.quick] // rings
    alpha = seconds_of(job, ring, SMALL)
    beta = max(seconds_of(job, ring, large) - alpha, 0.0) / (large * rings)
    return {"alpha_seconds": alpha, "beta_seconds_per_byte": beta}


def seconds_of(job: Ranks, ring: Sequence[int], nbytes: int) -> float:
    """Return the seconds in which each rank of a ring sends `nbytes` to its successor. Collective."""
    message, buffer = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    place = ring.index(job.world.rank) if len(ring) > 1 else None

    def once() -> float:
        job.comm.barrier()
        start = time.perf_counter()
        if place is not None:
            after, before = ring[(place + 1) % len(ring)], ring[place - 1]
            job.world.mpi.COMM_WORLD.Sendrecv(message, after, recvbuf=buffer, source=before)
        return time.perf_counter() - start

    once()  # the first call opens connections
    repeats = int(MESSAGES[job.options.quick] / max(*job.gather(once()), 1e-9))
    times = job.gather([once() for _ in range(min(MOST, max(FEWEST, repeats)))])
    return float(statistics.median(max(repeat) for repeat in zip(*times, strict=True)))


def text_of(link: dict[str, float]) -> str:
    beta = link["beta_seconds_per_byte"]
    return f"latency {seconds(link['alpha_seconds'])}, {size(1 / beta) + '/s' if beta else 'no limit'}"


def network(link: dict[str, float]) -> Row:
    fine = link["alpha_seconds"] < LATE and link["beta_seconds_per_byte"] * SLOW_LINK <= 1
    return judgement("network", f"{text_of(link)} per node", fine, NAME_IT)
