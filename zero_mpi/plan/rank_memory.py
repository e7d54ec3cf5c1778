"""Memory of the largest rank, by purpose. The runtime's own layout code computes all sizes.

Rank 0 needs the most memory: it owns the longest slice of every unit. The bytes are on its device; the host
memory of a rank with a GPU is listed separately. A process also needs memory for the interpreter, libraries
(some 100 MB; on a GPU, a CUDA context and kernels), the tokens of the corpus, and the MPI library.
"""

import mmap
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from zero_mpi import device, ops
from zero_mpi.cli.text import size
from zero_mpi.comm import kinds
from zero_mpi.comm.kinds import RANK_BYTES, Reductions, padded, window_bytes
from zero_mpi.config.optimizer import state_count
from zero_mpi.config.settings import Config
from zero_mpi.data import files_of
from zero_mpi.data.corpus import Corpus
from zero_mpi.data.documents import MOST_HELD
from zero_mpi.data.encoded_cache import LEAST, folder
from zero_mpi.data.text_files import collect_files, library_files
from zero_mpi.data.token_formats import token_files
from zero_mpi.environment.limits import Limits, read_limits
from zero_mpi.launch.dev_shm import WITH_UCX
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.models.model_config import elements
from zero_mpi.optim.offload import BUFFER_SETS, chunk_of
from zero_mpi.plan.case import Case, check_sums, make_case
from zero_mpi.plan.simulate import KERNELS, simulate
from zero_mpi.sharding.parameters import NONE, STATE
from zero_mpi.sharding.schedule import REDUCTIONS_IN_FLIGHT
from zero_mpi.sharding.unit import BYTES, Unit

ROUNDS = 2  # after the second round, no round allocates buffers
NUMBER = 8  # bytes of a float64 or an int64


def title(text: str) -> Any:
    """Return a field for bytes that a plan shows under the title `text`."""
    return field(metadata={"title": text})


def titles(kind: Any) -> dict[str, str]:
    return {entry.name: entry.metadata["title"] for entry in fields(kind)}


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0. Of memory that the ranks of a node share, only this rank's part counts."""

    parameters: int = title("parameters")  # slices, or full parameters if replicated
    masters: int = title("parameters in fp32")  # in low precision, where `parameters` are rounded
    gradients: int = title("gradients")
    moments: int = title("moments")  # optimizer states and a moving average
    rooms: int = title("buffers for moments")  # buffers on the GPU while offloaded moments are updated
    gathered: int = title("gathered units")  # full parameters while layers use them
    unpacked: int = title("unpacked blocks")  # float parameters that are unpacked from gathered blocks
    gradient_buffers: int = title("gradient buffers")  # gradients of a micro-batch, before they are reduced
    activations: int = title("activations")  # arrays that layers keep or allocate, without the logits
    logits: int = title("logits")
    transport: int = title("received shards")  # receive buffers of reductions
    tables: int = title("tables")  # weight decay and sums of squares of each chunk
    workspace: int = title("workspace of products")  # scratch memory of the GPU's library
    snapshot: int = title("copies for --async-save")  # only while a checkpoint is written
    # Not on the device: all memory that a node's ranks share; pinned memory and snapshots.
    node_shared: int = title("(a node in /dev/shm)")
    host: int = title("(in the host's memory)")

    @property
    def total(self) -> int:
        return int(sum(count for name, count in asdict(self).items() if name not in ELSEWHERE))


TITLES = titles(Memory)
ELSEWHERE = ("node_shared", "host")  # fields with memory that is not on rank 0's device


def plan_memory(case: Case) -> Memory:
    """Return the memory of a case."""
    simulation, nbytes, host = simulate(case, ROUNDS), Counter[str](), case.transport.pinned(case.ranks)
    for unit, count in case.slices:
        nbytes.update(bytes_of(case, unit, count))
    on_host = {"moments": case.offload != NONE, "masters": case.offload == STATE, "snapshot": case.on_gpu}
    for name, is_on_host in on_host.items():
        if is_on_host:
            host += nbytes[name]
            nbytes[name] = 0
    rounds, slices = case.rounds, tuple(count for _, count in case.trained_slices)
    reductions = Reductions(
        ranks=case.ranks,
        nodes=case.nodes,
        per_node=case.per_node,
        slices=slices,
        itemsize=case.reduce_bytes,
        in_flight=min(REDUCTIONS_IN_FLIGHT, len(slices)),
        contributors=tuple(sorted({rounds.contributors(0), rounds.contributors(len(rounds) - 1)})),
        exact=case.exact,
        accumulates=case.strategy.shards_moments and len(rounds) > 1,
        replicated=case.hybrid,
    )
    chunks = [min(case.updated(unit, count), chunk_of(unit.quantum)) for unit, count in case.trained_slices]
    gathers, buffers = (sum(map(padded, sizes)) for sizes in (case.layout.gathers, case.layout.buffers))
    return Memory(
        **nbytes,
        rooms=BUFFER_SETS * case.offloaded_arrays * BYTES * max(chunks, default=0),
        gathered=-(-gathers // case.per_node) if case.shares_gathers else simulation.gathered,
        unpacked=simulation.unpacked,
        gradient_buffers=buffers if case.transport.shares_memory else simulation.gradient_buffers,
        activations=simulation.activations,
        logits=simulation.logits,
        transport=case.transport.scratch(reductions),
        workspace=KERNELS[case.device].workspace,
        node_shared=node_shared(case),
        host=host,
    )


def bytes_of(case: Case, unit: Unit, count: int) -> dict[str, int]:
    """Return the bytes of a unit that are kept between rounds. Only a slice of a shared array counts."""
    kind, trained, quantum = case.precision.compute, unit.trainable, unit.quantum
    width = case.sum_bytes
    updated, averages = case.updated(unit, count), case.ema is not None
    states = state_count(unit, case.qat) * (count if unit.full_matrices else updated)
    # With full gradients, a rank has a separate buffer for its summed shard, except for an allreduce.
    summed = unit.length + count * (not case.allreduces)
    if case.strategy.shards_moments or case.shares_full:
        summed = count
    # Each chunk of a slice has two sums of squares, each chunk of updated elements its weight decay.
    numbers = 2 * -(-count // quantum) + -(-updated // quantum)
    return {
        "parameters": unit.kept_bytes(kind) * (count if keeps_slices(case) else unit.partition(1).length),
        "masters": BYTES * updated * (case.precision.is_low and unit.kept_bytes(kind) < BYTES),
        "gradients": width * summed * trained,
        "moments": width * (states + averages * updated) * trained,
        "tables": NUMBER * numbers * trained,
        "snapshot": saved_bytes(case, unit, count) * case.async_save,
    }


def saved_bytes(case: Case, unit: Unit, count: int) -> int:
    """Return the bytes that `count` elements take in a checkpoint: parameters, moments, averages."""
    trained, averages, width = unit.trainable, case.ema is not None, case.sum_bytes
    files = BYTES * (1 + averages) * (trained or case.model.lora is None)
    return count * (files + width * (state_count(unit, case.qat) * trained + (width > BYTES)))


def checkpoint_bytes(case: Case) -> int:
    """Return the bytes of a checkpoint's tensors: weights (or only adapters), averages, moments."""
    sizes = ((unit, sum(p.size for p in unit.params.values())) for unit in case.layout.units)
    return sum(saved_bytes(case, unit, elements) for unit, elements in sizes)


def keeps_slices(case: Case) -> bool:
    """Return True if only a rank's slices of the parameters count as its memory."""
    shared = case.shares_full and case.strategy.shards_moments
    return shared or case.strategy.shards_parameters


def node_shared(case: Case) -> int:
    """Return a node's bytes in shared windows: full or gathered parameters, gradients, counters."""
    if not case.transport.shares_memory:
        return 0
    layout = case.layout
    full = [partition.length for partition in layout.full(case.owners)] if case.shares_full else []
    arrays = layout.gathers if case.shares_gathers else full
    return window_bytes(arrays, layout.buffers, case.per_node) + RANK_BYTES * case.per_node


# Bytes of each rank (interpreter, NumPy, MPI) and of the files that a node's ranks share, without and with
# compiled operations; bytes of the compiler while a rank compiles the operations for the first time.
PLAIN_RANK, PLAIN_FILES = 44 << 20, 22 << 20
RANK, FILES, COMPILER = 88 << 20, 96 << 20, 64 << 20
STEP = 1 << 24  # the request for a node is a multiple of this number of bytes
BYTES_OF_TOKEN = 3  # bytes of text per token, unless a token is a byte
READING = 2  # extra memory while rank 0 reads text, as a multiple of the tokens' bytes


@dataclass(frozen=True)
class Resident:
    """Bytes that a job needs on a node, by purpose."""

    programs: int = title("programs and libraries")  # interpreters, and the compiler
    mpi: int = title("MPI's own segments")
    text: int = title("tokens of the text")  # copies on all ranks
    arrays: int = title("arrays, as planned")  # host memory of all ranks
    sample: int = title("sample at the end")  # rank 0 gathers the full model for it

    @property
    def total(self) -> int:
        return int(sum(asdict(self).values()))

    @property
    def ask(self) -> int:
        return -(-self.total // STEP) * STEP


def resident(case: Case, memory: Memory, text: int, sample: bool) -> Resident:
    """Return a node's bytes by purpose; `text`: bytes of all tokens; `sample`: True if rank 0 shows one."""
    ranks = case.per_node
    return Resident(
        programs=programs(ranks),
        mpi=ranks * WITH_UCX,
        text=ranks * text + max(0, READING * text - ranks * private(case, memory)),
        arrays=ranks * private(case, memory) + memory.node_shared,
        sample=4 * elements(case.model) * sample,
    )


def programs(ranks: int) -> int:
    """Return the bytes of interpreters and libraries of `ranks` ranks of a node, and of the compiler."""
    if ops.backend() == "numpy":
        return ranks * PLAIN_RANK + PLAIN_FILES
    return ranks * RANK + FILES + COMPILER


def private(case: Case, memory: Memory) -> int:
    """Return the planned host bytes of a rank, without shared memory of its node."""
    if case.on_gpu:
        return memory.host
    shared = memory.gathered * case.shares_gathers + memory.gradient_buffers * case.transport.shares_memory
    if case.transport.shares_memory and case.shares_full:
        shared += memory.parameters if case.strategy.shards_moments else memory.gradients
    return memory.total - shared


def text_bytes(config: Config, model: ModelConfig) -> int:
    """Return the bytes of tokens that each rank holds, estimated from file sizes without reading the data.

    Large token files and large cached texts are mapped from disk and count as 0 bytes.
    """
    width = 2 if model.vocab_size <= 1 << 16 else 4
    total = 0
    held_out = collect_files(config.val_data, "--val-data")
    for files in (files_of(config.data) if config.data else library_files(), held_out):
        tokens = token_files(files)
        nbytes = sum(path.stat().st_size for _, path in tokens or files)
        ids = nbytes if tokens else width * nbytes // (1 if model.vocab_size <= 300 else BYTES_OF_TOKEN)
        is_in_file = tokens or (nbytes >= LEAST and folder() is not None)
        if ids <= MOST_HELD or not is_in_file:
            total += ids
    return total


def text_of(corpus: Corpus) -> int:
    """Return the bytes of tokens of a corpus that has been read."""
    return sum(part.stream.nbytes for part in (*corpus.parts, *corpus.held_out))


# ------------------------------------------------------------------------------------------- is there enough?
# A run that exceeds a limit of its node is killed without a message, minutes later: by a control group, by a
# limit of a process, for lack of free memory. So the plan is compared with these limits before large arrays
# are allocated. Space in /dev/shm is checked when it is allocated (`comm.shared.memory`).

REMEDIES = "more nodes, a smaller model or --micro-batch, --recompute or --strategy full-shard"
ASK = "request more (Slurm: --mem, containers: --memory)"


@dataclass(frozen=True)
class NodeInfo:
    """Memory of a host, with limits for all its ranks together and for each rank."""

    name: str
    ranks: int
    limits: Limits
    mapped: int  # bytes of address space that a rank uses now
    written: int  # bytes of private writable memory that a rank has now


def nodes_of(world: World) -> list[NodeInfo]:
    """Return a NodeInfo for each node, on all ranks. Collective."""
    host = None
    if world.node.rank == 0:
        sizes = [int(pages) * mmap.PAGESIZE for pages in Path("/proc/self/statm").read_text().split()]
        host = NodeInfo(platform.node(), world.node.size, read_limits(), mapped=sizes[0], written=sizes[5])
    return [node for node in world.comm.allgather_object(host) if node is not None]


def find_problem(nodes: list[NodeInfo], config: Config, model: ModelConfig, ranks: int) -> str:
    """Return why some node lacks memory for the run, or an empty text."""
    if device.in_use().name != "cpu":
        return ""  # the arrays are on the GPU, whose library reports if memory is short
    least = 4 * BYTES * elements(model) // len(nodes)  # minimum bytes on a node under any strategy
    for node in nodes:
        if not config.frozen and least > node.limits.memory:
            return refusal(node, model, "parameters, gradients and moments", least)
    # Assume equally many ranks per node or, if that is impossible, one node with all ranks.
    count = len(nodes) if ranks % len(nodes) == 0 else 1
    case = make_case(replace(config, device="cpu"), model, ranks, count)
    case = replace(case, transport_wanted=kinds.SERIAL) if ranks == 1 else case
    check_sums(case)
    memory, text = plan_memory(case), text_bytes(config, model)  # computed once for all nodes
    for node in nodes:
        problem = node_problem(node, model, private(case, memory), text, memory.node_shared)
        if problem:
            return problem
    return ""


def node_problem(node: NodeInfo, model: ModelConfig, arrays: int, text: int, shared: int) -> str:
    """Return why this node lacks memory, or an empty text.

    Each rank will allocate the bytes of `arrays` and `text`, and the node `shared` bytes in addition.
    """
    total = node.ranks * (arrays + text) + shared
    if total > node.limits.memory:
        return refusal(node, model, f"arrays and text of {node.ranks} rank(s)", total)
    for option, limit, nbytes in (
        ("-v", node.limits.address_space, node.mapped + arrays + text + shared),
        ("-d", node.limits.data, node.written + arrays + text),
    ):
        if limit is not None and nbytes > limit:
            return (
                f"not enough memory: a rank on {node.name} needs about {size(nbytes)}, but ulimit {option} "
                f"allows {size(limit)}: put ulimit {option} unlimited into the job script, or use {REMEDIES}"
            )
    return ""


def refusal(node: NodeInfo, model: ModelConfig, purpose: str, nbytes: int) -> str:
    """Return a line with the planned memory, the allowed memory, and the remedy."""
    limits = node.limits
    by_group = limits.group_free is not None and limits.group_free <= limits.available
    group = f"its control group has {size(limits.memory)} left of {size(limits.group_memory or 0)}"
    limit = group if by_group else f"{size(limits.memory)} are free"
    return (
        f"not enough memory: {purpose} need about {size(nbytes)} on {node.name} ({elements(model):,} "
        f"parameters), but {limit}: {ASK}, or use {REMEDIES}"
    )
