"""Summary of a run: a few aligned lines at its start, and the fields of the event `started`.

The planner (`zero-mpi plan`) estimates memory and the work of a step for the transport and the hosts of this
job. This takes rank 0 a few milliseconds. If the planner fails, the run continues without the lines that need
the plan.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import __version__, device, environment, ops
from zero_mpi.cli.text import gibibytes, plural, size
from zero_mpi.config.optimizer import schedule_of
from zero_mpi.config.settings import Config
from zero_mpi.data import Corpus, StepLoader, named
from zero_mpi.device.types import Array
from zero_mpi.launch.ending import BAD_USAGE, REQUEUE
from zero_mpi.launch.stopping import was_stopped_early
from zero_mpi.launch.world import World
from zero_mpi.plan.case import Case, make_case
from zero_mpi.plan.rank_memory import ELSEWHERE, TITLES, Memory, plan_memory, resident, text_of
from zero_mpi.plan.report import base
from zero_mpi.plan.simulate import Simulator
from zero_mpi.plan.workspaces import Compiled
from zero_mpi.telemetry import events, log
from zero_mpi.telemetry.events import Events
from zero_mpi.telemetry.metrics import METRICS, last_step
from zero_mpi.telemetry.proof import MOST_STEPS
from zero_mpi.telemetry.status import DONE, FAILED, STOPPED, Status
from zero_mpi.train.setup import Session

TITLE = 11  # width of the column of titles
SHOWN = 3  # number of kinds of memory that are listed


@dataclass(frozen=True)
class Start:
    """A session, and facts of the job at its start. 0, None or "" mean that a value is not known."""

    session: Session
    hosts: Sequence[tuple[str, int]]  # (name, number of ranks) of each host, ordered by first rank
    peak: float  # FLOP/s of all ranks together
    memory: Memory | None = None  # planned memory of the largest rank
    flop: float = 0.0  # FLOP of the matmuls in a step
    ask: int = 0  # bytes of host memory to request for each node
    base: str = ""  # memory of a quantized base model, as text

    @property
    def ranks(self) -> int:
        return self.session.comm.size

    @property
    def threads(self) -> int:
        return int(self.session.description.machine["threads"])

    @property
    def parameters(self) -> int:
        return sum(param.size for param in self.session.module.params.values())

    def share(self, seconds: float) -> float | None:
        """Return the fraction of the peak that a step of `seconds` seconds reaches; None if unknown."""
        is_known = self.peak > 0 and self.flop > 0 and seconds > 0
        return self.flop / (seconds * self.peak) if is_known else None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event `started`, which reports a job's start."""
        config = self.session.config
        return {
            "ranks": self.ranks,
            "hosts": [[name, count] for name, count in self.hosts],
            "arch": self.session.model.arch,
            "parameters": self.parameters,
            "strategy": config.strategy,
            "transport": self.session.transport,
            "device": device.in_use().about,
            "precision": config.precision,
            "threads": self.threads,
            "version": __version__,
            **({"planned_bytes": self.memory.total} if self.memory else {}),
            **({"step_flop": self.flop, "peak_flops": self.peak} if self.flop else {}),
        }


def plan(start: Start) -> Start:
    """Return `start` with the memory and the work that the planner estimates."""
    try:
        case = case_of(start)
        memory, session = plan_memory(case), start.session
        node = resident(case, memory, text_of(session.corpus), session.config.sample > 0)
        text = base(case) if case.model.stored else ""
        return replace(start, memory=memory, flop=step_flop(case), ask=node.ask, base=text)
    except Exception as error:  # a failed estimate must not end a run
        log.debug("no memory estimate for this run: %s: %s", type(error).__name__, error)
        return start


def case_of(start: Start) -> Case:
    """Return the case to plan: the run's settings, with the choices made for `auto`."""
    session, ranks, kind = start.session, start.ranks, start.session.comm.kind
    nodes = (session.nodes or len(start.hosts)) if kind.spans_nodes else 1
    if session.module.group.size < ranks:
        nodes = ranks // session.module.group.size
    config = replace(session.config, device=device.in_use().name)
    case = make_case(config, session.model, ranks, nodes)
    return replace(case, transport_wanted=kind)


def lines(start: Start) -> Iterator[str]:
    """Yield the lines of the summary."""
    session, config = start.session, start.session.config
    model, loader, machine = session.model, session.loader, session.description.machine
    ranks, place = plural(start.ranks, "rank"), start.hosts[0][0]
    if len(start.hosts) > 1:
        place = plural(len(start.hosts), "host")
    threads = "" if "device" in machine else f" x {plural(start.threads, 'thread')}"
    parts = machine.get("precision", "fp32"), machine.get("device", ""), machine["operations"]
    yield f"zero_mpi {__version__}: {ranks}{threads} on {place}, {', '.join(filter(None, parts))}"
    sizes = f"{model.block_count} layers, width {model.embedding_length}, {model.head_count} heads"
    rows = [
        ("model", f"{model.arch}, {start.parameters:,} parameters: {sizes}, context {config.context}"),
        ("base", start.base),
        ("strategy", f"{config.strategy} over {ranks}, {config.reduction} reduction"),
        ("transport", session.transport),
    ]
    if start.memory is not None:
        request = f"request {gibibytes(start.ask)} per node"
        estimate = f"{size(start.memory.total)} planned for the largest rank ({request}), including"
        rows.append(("memory", f"{estimate}\n{' ' * TITLE}{kinds(start.memory)}"))
    rows += data_rows(config, session.corpus, loader)
    count = loader.micro_batches
    text = f"{loader.positions_per_step:,} tokens in {count:,} micro-batch{'es' * (count != 1)} of "
    text += f"{config.micro_batch} x {config.context}"
    if start.flop and start.peak:
        text += f"; {flops(start.flop)} per step, measured peak {flops(start.peak)}/s"
    rows.append(("step", text))
    for title, text in rows:
        if text:
            yield from f"{title + ':':{TITLE}}{text}".splitlines()


def data_rows(config: Config, corpus: Corpus, loader: StepLoader) -> Iterator[tuple[str, str]]:
    """Yield rows (title, text) on the data and on how often the run reads it."""
    documents = plural(corpus.documents - corpus.val_documents, "document")
    held_out = f"{corpus.tokens[1]:,} for validation"
    yield "data", f"{corpus.tokens[0]:,} tokens in {documents}, {held_out}, from {named(config.data)}"
    for part, epochs in zip(corpus.parts, loader.epochs(config.steps), strict=True):
        if part.name:
            yield "source", f"{part.name}: {part.share:.1%} of the windows, {epochs:.2f} epochs"
    yield "packed", loader.windows.about()
    times, last = min(loader.epochs(config.steps)), schedule_of(config)(config.steps)
    amount = f"{times:.1f} epochs" if times >= 1 else f"{times:.3%} of the data"
    warmup = f"rate {config.lr:g} after {plural(config.warmup, 'warmup step')}"
    yield "steps", f"{config.steps:,}, {amount}; {warmup}, then {config.schedule} to {last:g}"


def kinds(memory: Memory) -> str:
    """Return a text with the largest kinds of memory, and the sum of the remaining kinds."""
    pairs = ((count, name) for name, count in asdict(memory).items() if name not in ELSEWHERE)
    sizes = sorted(pairs, reverse=True)
    parts = [f"{size(count)} {TITLES[name]}" for count, name in sizes[:SHOWN] if count]
    rest = sum(count for count, _ in sizes[SHOWN:])
    return ", ".join(parts + [f"{size(rest)} other"] * (rest > 0))


def flops(count: float) -> str:
    """Return a number of floating-point operations as text, in FLOP."""
    count /= 1e6
    for unit in "MGT":
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1e3
    return f"{count:.3g} PFLOP"


def cautions(start: Start) -> Iterator[str]:
    """Yield warnings on cores and threads that the user may want to act on."""
    config, ranks_here = start.session.config, start.hosts[0][1]
    quota, threads = environment.quota(), ranks_here * start.threads
    if quota is not None and threads > max(1, quota):
        yield (
            f"{threads} threads run on this node under a CPU quota of {quota:g}, so the kernel throttles "
            "them; start fewer ranks or threads, or raise the quota (containers: --cpus)"
        )
    is_set = config.threads is not None or environment.threads_were_set
    if is_set or device.in_use() is not device.HOST or config.reduction != "exact":
        return
    cores = environment.node_cores()
    if threads < cores:
        yield (
            f"{cores - threads} of {cores} cores are idle: start more ranks, or set --threads (keep it the "
            "same when resuming, because the last bits depend on it)"
        )


class Outcome:
    """Writer of a rank's status and events. It writes nothing if the job has lost its folder."""

    def __init__(self, out: Path, world: World, steps: int) -> None:
        self.status = Status(out, world.rank, world.size, steps, world.comm.folder_problem)
        self.events = Events(out, world.rank, world.comm.folder_problem)
        self._out, self._previous_job = out, dict[str, Any]()
        world.at_end.append(self.end)

    def open(self) -> None:
        """Read the status and last recorded step of the previous job, and write that this job runs."""
        self.status.begin()
        self._previous_job = self.status.before()
        status_step = self._previous_job.get("step")  # may be too low; the records have every step
        step = status_step if type(status_step) is int and status_step <= MOST_STEPS else 0
        self._previous_job["step"] = max(step, last_step(self._out / METRICS))

    @property
    def follows_a_stop(self) -> bool:
        """Return, on rank 0, whether a batch system stopped the previous job before its first step."""
        return was_stopped_early(str(self._previous_job.get("reason", "")))

    def begin(self, start: Start) -> None:
        """Write, on rank 0, an event for the job's start and, after a resume, one for its checkpoint."""
        session, before = start.session, self._previous_job
        self.events.begin(session.progress.step, before, **start.fields())
        if session.resumed is not None:
            ranks = {"from_ranks": before["ranks"]} if "ranks" in before else {}
            self.events.note(events.RESUMED, folder=session.resumed.name, **ranks)

    def at(self, step: int) -> None:
        self.status.at(step)
        self.events.at(step)

    def end(self, code: int, reason: str) -> None:
        if code == BAD_USAGE:
            self.status.refused(reason)
            return
        state = {0: DONE, REQUEUE: STOPPED}.get(code, FAILED)
        reason = reason or self.events.reason  # why the run was stopped after a step
        self.status.end(state, reason)
        self.events.end(state, reason)


# ------------------------------------------------------------------------------------------- utilization
# Model FLOPs utilization (MFU) is the fraction of the machine's peak that a run reaches. The peak is measured
# at the start of a run, as the speed of matmuls on all ranks at once. The work of a step is its matmuls in
# forward and backward, as the planner counts them. Recomputation to save memory does not count (Chowdhery et
# al., "PaLM", 2022, appendix B).

SECONDS = 0.04  # seconds of timed matmuls, after one that starts threads or compiles
LONG = 2e-3  # seconds that a matmul must take; a smaller matrix is too fast to time
EDGES = (512, 1024, 2048, 4096)  # numbers of rows and columns of the matrices
BLOCK = 64  # rows of random numbers; they are repeated, because making them is slower than a matmul


def measure(world: World, dtype: Any) -> float:
    """Return the FLOP per second of all ranks together, measured with matmuls in `dtype`. Collective.

    On the host, bf16 and fp16 are measured in float32 if no library multiplies them.
    """
    kind = np.dtype(np.float32) if ops.products(dtype)[1] else dtype
    world.comm.barrier()  # all ranks start together, because they share cores, caches and power
    return math.fsum(world.comm.allgather_object(rate(kind)))


def rate(dtype: Any) -> float:
    """Return FLOP per second of this rank, measured with matrices that are large enough to keep it busy."""
    for edge in EDGES:
        a, b, out = (matrix(edge, dtype) for _ in range(3))
        products(1, a, b, out)
        seconds = products(1, a, b, out)
        if seconds >= LONG:
            break
    count = max(1, int(SECONDS / seconds))
    return 2.0 * edge**3 * count / (products(count, a, b, out) if count > 1 else seconds)


def products(count: int, a: Array, b: Array, out: Array) -> float:
    """Return the seconds that `count` matmuls take with the operation that layers use."""
    start = time.perf_counter()
    for _ in range(count):
        ops.linear_backward_x(a, b, out)
    device.in_use().synchronize()
    return time.perf_counter() - start


def matrix(edge: int, dtype: Any) -> Array:
    """Return a matrix of random numbers. Equal numbers would mislead: processors multiply them faster."""
    processor = device.in_use()
    array = processor.empty(edge * edge, dtype).reshape(edge // BLOCK, BLOCK, edge)
    block = np.random.default_rng(edge).random((BLOCK, edge), np.float32).astype(dtype)
    array[...] = processor.from_host(block)
    return array.reshape(edge, edge)


class Once(Compiled):
    """Fake operations in which backward recomputes nothing."""

    def attention_backward(
        self, dy: Array, q: Array, k: Array, v: Array, kept: Any
    ) -> tuple[tuple[Array, Array, Array], bool]:
        """Return the results of attention's backward, and False: it does not recompute the weights."""
        return super().attention_backward(dy, q, k, v, kept)[0], False


def step_flop(case: Case) -> float:
    """Return the FLOP of the matmuls in a step, over all ranks."""
    micro_case = Case(
        case.model,
        batch_size=case.micro_batch,
        micro_batch=case.micro_batch,
        context=case.context,
        frozen=case.frozen,
        packed=case.packed,
        preference=case.preference,
        base_is_reference=case.base_is_reference,
        teacher=case.teacher,
    )
    events = Simulator(micro_case, Once()).step()
    sequences = case.batch_size / case.micro_batch  # the last micro-batch may be smaller
    return sequences * math.fsum(event.flop for event in events)
