"""Checks of the hosts: versions, launcher, cores and threads, load, limits, shared memory, CUDA devices.

A launcher of another MPI than mpi4py's starts N jobs of one rank instead of one job of N ranks; only the
launcher check detects this. Common mistakes with cores are more ranks than cores, ranks bound to fewer cores
than they have threads, and several ranks bound to one core while other cores are idle. Without shared memory
a run uses messages, which are slower but give the same bits. Some MPI libraries claim to support the memory
of CUDA devices and then crash, so a separate process tests a transfer (`comm.gpu.probe`).
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_mpi import environment, ops
from zero_mpi.cli.text import FEW, few, plural, ranges, ranks, size, span
from zero_mpi.comm.gpu.probe import PROBE, PROBE_SECONDS, run_probe
from zero_mpi.commands.doctor.ranks import BAD, NOTE, Ranks, Row, judgement
from zero_mpi.environment.limits import Limits, read_limits
from zero_mpi.launch.consistency import installation, split_into
from zero_mpi.launch.dev_shm import PLACE, WITH_UCX
from zero_mpi.ops.code_cache import package_version
from zero_mpi.plan.rank_memory import programs

SAME_MPI = (
    "use the mpirun of the MPI that mpi4py loads (above); with srun, --mpi=pmi2 for MPICH and --mpi=pmix for "
    "Open MPI"
)
FAST = "pip install 'zero-mpi[fast]', and leave ZERO_MPI_OPS and NUMBA_DISABLE_JIT unset"
BIND = (
    "bind each rank to its own cores: mpiexec -bind-to core (MPICH), --bind-to core --map-by core "
    "(Open MPI), --cpu-bind=cores (srun); or do not bind at all"
)
LEAST_MEMORY = 512 << 20  # minimum bytes per rank; the interpreter and the libraries take 100 MiB of them
LEAST_LOCKED = 64 << 20  # bytes; networks with remote memory access lock buffers in memory
SPARE_FILES = 64  # open files that a rank needs in addition to a connection to each other rank
PROC = Path("/proc")
SAMPLES, PAUSE = 4, 0.02  # number of samples of the load (the minimum is used); seconds between samples
SMALL = 256 << 20  # bytes; less free shared memory than this gets a note (containers have 64 MiB)
TRIAL = 1 << 20  # bytes of the test window in shared memory
MORE_SHM = "containers: --shm-size=16g or --ipc=host; else: mount -o remount,size=16g /dev/shm (as root)"
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
DRIVER = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvgpu")  # PCs and servers, WSL, Jetson
STAGED = (
    "messages go through host memory; for more speed use the CUDA-aware MPI of your site, with mpi4py built "
    "on it"
)

# ------------------------------------------------------------------------------------- versions, launcher


def versions(job: Ranks) -> list[Row]:
    """Compare the versions of all ranks. A difference is bad, except in the version of mpi4py. Collective."""
    records = job.gather(installation(job.world) | {"mpi4py": package_version("mpi4py") or "none"})
    return [version(name, [record.get(name, "none") for record in records]) for name in records[0]]


def version(name: str, values: list[str]) -> Row:
    """Return the row that compares the ranks' values for one name."""
    members_by_value = dict[str, list[int]]()
    for rank, value in enumerate(values):
        members_by_value.setdefault(value, []).append(rank)
    first, *others = members_by_value
    if others:
        text = ", ".join(few([f"{value} on {ranks(members_by_value[value])}" for value in others]))
        remedy = "install the same versions on all hosts, and start all ranks from one environment"
        if name == "BLAS":
            remedy = "use identical hosts, or set the same OPENBLAS_CORETYPE on all ranks"
        return Row(name, f"{first}, but {text}", NOTE if name == "mpi4py" else BAD, remedy)
    if name == "operations" and first == "numpy":
        return Row(name, "plain NumPy, several times slower than compiled kernels", NOTE, FAST)
    return Row(name, " ".join(first.split(", package")[0].split()))  # omit details of Open MPI


def library(job: Ranks) -> Iterator[Row]:
    yield launcher(job.world.size)
    yield thread_level(job.world.mpi)


def launcher(size: int, environ: Mapping[str, str] = os.environ) -> Row:
    if count := split_into(size, environ):
        return Row("launcher", f"it started {count} processes, but each is a job of one rank", BAD, SAME_MPI)
    return Row("launcher", plural(size, "rank"))


def thread_level(mpi: Any) -> Row:
    """Return the row on the MPI library's thread level. `mpi` is None without a library."""
    if mpi is None:
        remedy = "pip install 'zero-mpi[mpich]', or mpi4py built on the MPI of your site"
        return Row("MPI threads", "no MPI library can be loaded: one process only", NOTE, remedy)
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE:
        return Row("MPI threads", "multiple")
    value = "below multiple: transfers progress only between layers, because only one thread may call MPI"
    return Row("MPI threads", value, NOTE, "use an MPI built with MPI_THREAD_MULTIPLE")


# ------------------------------------------------------------------------------------------------- cores


@dataclass(frozen=True)
class Placement:
    """Cores of a rank, its number of threads, whether the user set it, and the rank's CPU quota."""

    cores: tuple[int, ...]
    threads: int
    threads_were_set: bool
    quota: float | None = None


@dataclass(frozen=True)
class NodePlacement:
    """Ranks of a host with their placements. `usable`: number of cores, limited by the lowest CPU quota."""

    name: str
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def cores(self) -> list[int]:
        return sorted({core for placement in self.placements for core in placement.cores})

    @property
    def usable(self) -> int:
        quotas = [int(placement.quota) for placement in self.placements if placement.quota is not None]
        return max(1, min([len(self.cores), *quotas]))

    @property
    def is_crowded(self) -> bool:
        return len(self.ranks) > self.usable

    @property
    def free(self) -> int:
        return self.usable - sum(rank.threads for rank in self.placements)


def cores(job: Ranks) -> list[Row]:
    """Check the hosts, cores and threads of all ranks. Collective."""
    usable, count = tuple(sorted(os.sched_getaffinity(0))), ops.use_threads()
    placements = job.gather(Placement(usable, count, environment.threads_were_set, environment.quota()))
    nodes = [
        NodePlacement(host, members, tuple(placements[rank] for rank in members))
        for members, host in job.named(job.nodes)
    ]
    return [*hosts(nodes), crowding(nodes), binding(nodes), threads(nodes)]


def hosts(nodes: list[NodePlacement]) -> Iterator[Row]:
    """Yield a row for each of the first hosts, and one row for all remaining hosts."""
    for node in nodes[:FEW]:
        cores = f"{plural(len(node.cores), 'core')} ({ranges(node.cores)})"
        bound = f"{span(len(placement.cores) for placement in node.placements)} for each rank"
        yield Row(f"host {node.name}", f"{ranks(node.ranks)} on {cores}, {bound}")
    if rest := nodes[FEW:]:
        yield Row("hosts", f"{len(rest):,} more, {span(len(node.ranks) for node in rest)} ranks on each")


def crowding(nodes: list[NodePlacement]) -> Row:
    """Return the row on hosts that have more ranks than cores."""
    title, crowded = "ranks and cores", [node for node in nodes if node.is_crowded]
    if not crowded:
        return Row(title, "no host has more ranks than cores")
    texts = [f"{plural(len(n.ranks), 'rank')} on {plural(n.usable, 'core')} of {n.name}" for n in crowded]
    remedy = f"fine for a test; for speed start at most {min(node.usable for node in crowded)} per host"
    return Row(title, ", ".join(few(texts)), NOTE, remedy)


def binding(nodes: list[NodePlacement]) -> Row:
    """Return the row on ranks that share a core while another core has no rank."""
    shared = list[str]()
    for node in nodes:
        bound: dict[tuple[int, ...], list[int]] = {}
        for rank, placement in zip(node.ranks, node.placements, strict=True):
            bound.setdefault(placement.cores, []).append(rank)
        shared += [
            f"{ranks(members)} of {node.name} share {plural(len(cores), 'core')} ({ranges(cores)})"
            for cores, members in bound.items()
            if len(members) > len(cores) and not node.is_crowded
        ]
    value = f"{', '.join(few(shared))} while other cores are free" if shared else "no rank shares a core"
    return judgement("binding", value, not shared, BIND)


def threads(nodes: list[NodePlacement]) -> Row:
    """Return the row on hosts whose ranks have too many threads for the cores, or leave cores idle."""
    value = f"{span(rank.threads for node in nodes for rank in node.placements)} for each rank"
    for node in nodes:
        most = min([max(1, node.usable // len(node.ranks)), *(len(rank.cores) for rank in node.placements)])
        if max(rank.threads for rank in node.placements) > most:
            cores = f"{plural(most, 'core')} for each of {plural(len(node.ranks), 'rank')} on {node.name}"
            was_set = any(rank.threads_were_set for rank in node.placements)
            names = [name for name in environment.THREADS if was_set and name in os.environ]
            remedy = f"unset {' '.join(names)}" if names else "do not set the number of threads"
            value += f", but {cores}: up to 10 times slower"
            return Row("threads", value, NOTE, f"{remedy}, or train with --threads {most}")
    idle = next((node for node in nodes if node.free > 0), None)
    if idle is None:
        return Row("threads", value)
    value += f"; {idle.free} of {plural(idle.usable, 'core')} of {idle.name} idle"
    advice = "start more ranks, or train with --threads auto (last bits differ from those of one thread)"
    return Row("threads", value, NOTE, advice)


# ----------------------------------------------------------------------------------------- load, limits


def load(job: Ranks) -> Iterator[Row]:
    """Check that no other programs slow down the measurements. Collective."""

    def busy_threads() -> int:
        """Return the minimum number of runnable threads on the host in SAMPLES samples; 0 if unknown."""
        samples = list[int]()
        with contextlib.suppress(OSError):
            for _ in range(SAMPLES):
                samples.append(int((PROC / "loadavg").read_text().split()[3].partition("/")[0]))
                time.sleep(PAUSE)
        return min(samples, default=0)

    loads = job.of_nodes(lambda: (busy_threads(), os.cpu_count() or 1))
    remedy = "the speeds below are measured while they run: wait until they end, or use another host"
    for count, (threads, cores), name in zip(map(len, job.nodes), loads, job.names, strict=True):
        if threads > max(cores, count):
            others = f"{threads - count} threads of other programs run on {name}"
            yield Row("load", f"{others}, with {count} ranks of this job on {cores} cores", NOTE, remedy)


def limits(job: Ranks) -> list[Row]:
    """Check memory and limits of all hosts; store `memory_bytes_per_rank` for the JSON file. Collective."""
    return limit_rows(job.of_nodes(read_limits), job)


def limit_rows(limits: list[Limits], job: Ranks) -> list[Row]:
    """Return the row on memory, and a few rows on limits that may be too low for a job."""
    hosts = list(zip(limits, map(len, job.nodes), strict=True))
    # Memory in bytes that each rank has if all ranks of its host use equal amounts.
    share = job.figures["memory_bytes_per_rank"] = min(host.memory // count for host, count in hosts)
    tight = next((host for host in limits if host.memory != host.available), None)
    limit = f"; a control group limits a host to {size(tight.group_memory or 0)}" if tight else ""
    most = max(count for _, count in hosts)
    overhead = size(programs(most) + most * WITH_UCX)
    value = f"{size(share)} for each rank{limit}; Python, libraries and MPI need {overhead} per host"
    remedy = "request more from the batch system (Slurm: --mem), or start fewer ranks per host"
    memory = judgement("memory", value, share >= LEAST_MEMORY, remedy)
    return [
        memory,
        *[row for host, name in job.named(limits) for row in harm(host, name, job.world.size)][:FEW],
    ]


def harm(host: Limits, name: str, count: int) -> Iterator[Row]:
    """Yield a row for each limit of a host that may be too low for a job of `count` ranks."""
    for limit, least, letter, text in (
        (host.address_space, None, "v", "address space of {} on {}: shared memory needs more"),
        (host.data, None, "d", "private memory of {} for a rank on {}"),
        (host.locked, LEAST_LOCKED, "l", "locked memory of {} on {}: too little for a fast network"),
    ):
        if limit is not None and (least is None or limit < least):
            slurm = "; under Slurm, PropagateResourceLimits=NONE" if letter == "l" else ""
            remedy = f"ulimit -{letter} unlimited, in the job script{slurm}"
            yield Row("limits", text.format(size(limit), name), NOTE, remedy)
    if host.files is not None and host.files < count + SPARE_FILES:
        value = f"{plural(host.files, 'open file')} on {name}, for {plural(count, 'rank')}"
        yield Row("limits", value, NOTE, f"ulimit -n {max(4096, 2 * count)}")


# ------------------------------------------------------------------------------------------ shared memory


def shared_memory(job: Ranks) -> list[Row]:
    """Check the shared memory of all hosts. Collective."""
    problems = job.gather(try_window(job) if job.node_comm is not None else "")
    by_node = [next(filter(None, (problems[rank] for rank in members)), "") for members in job.nodes]
    return shared_rows(job.of_nodes(free_bytes), by_node, job)


def free_bytes() -> int:
    """Return the number of free bytes in this host's shared memory."""
    try:
        return shutil.disk_usage(PLACE).free
    except OSError:
        return 0


def try_window(job: Ranks) -> str:
    """Test shared memory on this node. Return the problem, or "" if there is none. Collective."""
    from zero_mpi.comm.shared.memory import NoSharedMemory, Window  # needs an MPI library

    node, count = job.node_comm, len(job.nodes[job.node])
    try:
        window = Window(node, TRIAL, [(0, TRIAL)] if job.place == 0 else [])
    except NoSharedMemory as error:
        return str(error)
    memory = window.hand_over()
    memory[job.place :: count] = job.place % 251
    window.fence()
    node.Barrier()
    window.fence()
    others = [place for place in range(count) if (memory[place::count] != place % 251).any()]
    node.Barrier()  # no rank may free memory that another rank still reads
    del memory
    window.free()
    return f"writes of {plural(len(others), 'rank')} did not arrive" if others else ""


def shared_rows(free: list[int], problems: list[str], job: Ranks) -> list[Row]:
    """Return rows on shared memory. `free`, `problems`: free bytes and `try_window`'s text by host."""
    hosts = zip(free, map(len, job.nodes), job.names, strict=True)
    least, count, name = min(hosts, key=lambda host: host[0] / host[1])
    value = f"{size(least)} free in {PLACE} of {name}, for {plural(count, 'rank')}"
    memory = judgement("shared memory", value, least >= SMALL, MORE_SHM)
    broken = [f"{name}: {text}" for text, name in job.named(problems) if text]
    value = "created, written and read by all ranks of each host"
    if broken:
        value = f"{'; '.join(few(broken))}: a run would use messages"
    elif job.node_comm is None:
        value = "not tried: one process without MPI"
    return [memory, judgement("shared window", value, not broken, MORE_SHM)]


# -------------------------------------------------------------------------------------------------- CUDA


@dataclass(frozen=True)
class Devices:
    """CUDA devices of a host. `error` says why there are none; `mpi` is the result of the test transfer."""

    names: tuple[str, ...] = ()
    driver: str = ""
    error: str = ""
    cupy: str = ""
    mpi: str = ""
    takes_memory: bool = False


def cuda(job: Ranks) -> list[Row]:
    """Check the CUDA devices of all hosts. Collective."""
    return device_rows(job.of_nodes(find_devices), job.names)


def find_devices(command: Sequence[str] = PROBE, driver: Sequence[str] = DRIVER) -> Devices:
    """Return this host's devices. Without a driver, return no device and start no process."""
    if not any(map(os.path.exists, driver)):
        return Devices()
    cupy = next((f"{name} {version}" for name in CUPY if (version := package_version(name))), "")
    lines, end = run_probe(command, PROBE_SECONDS)
    facts, transfer, *_ = [*map(json.loads, lines), {"error": end}, {"error": end}]  # lines may be missing
    if facts.get("error") or not facts.get("names"):
        return Devices(error=facts.get("error") or "the driver finds no device", cupy=cupy)
    mpi = transfer.get("mpi") or transfer.get("error", "")
    return Devices(tuple(facts["names"]), facts["driver"], "", cupy, mpi, bool(transfer.get("takes_memory")))


def device_rows(devices: list[Devices], names: tuple[str, ...]) -> list[Row]:
    """Return the rows on devices of all hosts, or a single row if no host has a CUDA driver."""
    rows, counts = list[Row](), list[str]()
    for host, name in zip(devices, names, strict=True):
        counts.append(f"{len(host.names)} on {name}")
        if host.error:
            remedy = "run nvidia-smi on that host; reload or update its driver"
            rows.append(Row("CUDA", f"{name}: {host.error}", NOTE, remedy))
        elif any(each.names or each.error for each in devices):
            kinds = f"{plural(len(host.names), 'device')} ({', '.join(dict.fromkeys(host.names))})"
            cupy, aware = f"{name}: {host.cupy or 'not installed'}", "" if host.takes_memory else "no, "
            rows += [
                Row("CUDA", f"{name}: {kinds}, driver for CUDA {host.driver}"),
                judgement("CuPy", cupy, bool(host.cupy), "pip install 'zero-mpi[cuda12]' (or cuda13)"),
                judgement("CUDA-aware MPI", f"{name}: {aware}{host.mpi}", host.takes_memory, STAGED),
            ]
    if len({len(host.names) for host in devices}) > 1:
        text = f"hosts differ: {', '.join(counts)}"
        rows.append(Row("CUDA", text, NOTE, "start the job on identical hosts"))
    return rows or [Row("CUDA", "no CUDA device")]
