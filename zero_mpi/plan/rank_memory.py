"""Bytes that the largest rank holds, by what they are for; every size comes from the runtime's own layout.

Rank 0 is the largest: it owns the longest slice of every unit. They lie on its device; what a rank with a GPU
keeps in the host's memory is told apart. Beside what is listed a process has its interpreter and libraries
(some 100 MB; a CUDA context and the kernels of libraries), the tokens of the corpus, and whatever the MPI
library takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from zero_mpi import ops
from zero_mpi.comm.scratch import Reductions
from zero_mpi.comm.shared.gradient_pool import padded, window_bytes
from zero_mpi.comm.shared.words import RANK_BYTES
from zero_mpi.config.optimizer import state_count
from zero_mpi.config.settings import Config
from zero_mpi.data import files_of
from zero_mpi.data.corpus import Corpus
from zero_mpi.data.encoded_cache import LEAST, folder
from zero_mpi.data.text_files import library_files
from zero_mpi.data.token_formats import token_files
from zero_mpi.data.token_spans import MOST_HELD
from zero_mpi.launch.dev_shm import WITH_UCX
from zero_mpi.models import ModelConfig
from zero_mpi.models.model_config import elements
from zero_mpi.optim.offload import ROOMS, piece_of
from zero_mpi.plan.case import Case
from zero_mpi.plan.simulate import KERNELS, simulate
from zero_mpi.sharding.host_masters import NONE, STATE
from zero_mpi.sharding.schedule import REDUCTIONS_IN_FLIGHT
from zero_mpi.sharding.unit import BYTES, Unit

ROUNDS = 2  # from the second on every round finds the buffers that it needs
NUMBER = 8  # bytes of a float64 or an int64


def called(title: str) -> Any:
    """Bytes that are called so where a plan is shown."""
    return field(metadata={"title": title})


def titles(kind: Any) -> dict[str, str]:
    """What the fields of a class of such bytes are called."""
    return {each.name: each.metadata["title"] for each in fields(kind)}


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0. What a node shares in one copy counts by this rank's part of it."""

    # Kept between rounds and steps: slices, or wholes where replicated.
    parameters: int = called("parameters")
    masters: int = called("parameters in fp32")  # where `parameters` are rounded copies of them
    gradients: int = called("gradients")
    moments: int = called("moments")  # and a moving average
    rooms: int = called("rooms for moments")  # on the GPU, which they pass through
    gathered: int = called("gathered units")  # whole for a while
    unpacked: int = called("unpacked blocks")  # what is made for layers of gathered blocks
    gradient_buffers: int = called("gradient buffers")  # of a micro-batch, before they are reduced
    activations: int = called("activations")  # what layers keep and make, but for the logits
    logits: int = called("logits")
    transport: int = called("arriving slices")  # in a reduction
    tables: int = called("tables")  # where chunks lie, which ones decay, their sums of squares
    workspace: int = called("workspace of products")  # of the GPU's library
    snapshot: int = called("copies for --async-save")  # while a checkpoint is written
    # Not of a rank: what those of a node need together. Not on the device: pinned memory, and the snapshot.
    node_shared: int = called("(a node in /dev/shm)")
    host: int = called("(in the host's memory)")

    @property
    def total(self) -> int:
        """Of the rank, on its device."""
        return int(sum(count for name, count in asdict(self).items() if name not in ELSEWHERE))

    @property
    def state(self) -> int:
        """What lasts from step to step."""
        return self.parameters + self.masters + self.gradients + self.moments


TITLES = titles(Memory)
ELSEWHERE = ("node_shared", "host")  # what is of no rank, or not on its device


def plan_memory(case: Case) -> Memory:
    """The memory of a case."""
    seen, kept, host = simulate(case, ROUNDS), Counter[str](), case.transport.pinned(case.ranks)
    for unit, own in case.slices:
        kept.update(bytes_of(case, unit, own))
    away = {"moments": case.offload != NONE, "masters": case.offload == STATE, "snapshot": case.on_gpu}
    for name, is_away in away.items():
        if is_away:
            host += kept[name]
            kept[name] = 0
    pieces = [min(case.updated(unit, own), piece_of(unit.quantum)) for unit, own in case.trained]
    gathers, buffers = (sum(map(padded, sizes)) for sizes in (case.layout.gathers, case.layout.buffers))
    return Memory(
        **kept,
        rooms=ROOMS * case.offloaded * BYTES * max(pieces, default=0),
        gathered=-(-gathers // case.per_node) if case.shares_gathers else seen.gathered,
        unpacked=seen.unpacked,
        gradient_buffers=buffers if case.transport.shares_memory else seen.gradient_buffers,
        activations=seen.activations,
        logits=seen.logits,
        transport=case.transport.scratch(reductions(case)),
        workspace=KERNELS[case.device].workspace,
        node_shared=node_shared(case),
        host=host,
    )


def bytes_of(case: Case, unit: Unit, own: int) -> dict[str, int]:
    """What is kept of a unit between rounds and steps, wherever it lies; of what ranks share, slices."""
    kind, trained, quantum = case.precision.compute, unit.trainable, unit.quantum
    updated, averages = case.updated(unit, own), case.ema is not None
    states = state_count(unit) * (own if unit.whole else updated)
    # Unless an allreduce sums in place, a slice is summed beside the whole, into which it is gathered.
    summed = unit.length + own * (not case.allreduces)
    if case.strategy.shards_moments or case.shares_wholes:
        summed = own
    # Of a chunk: its place (in slices), whether it decays (in what is updated), its square twice.
    numbers = -(-own // quantum) + -(-updated // quantum) + 2 * (unit.length // quantum)
    return {
        "parameters": unit.kept_bytes(kind) * (own if keeps_slices(case) else unit.dealt[0]),
        "masters": BYTES * updated * (case.precision.is_low and not unit.room_unpacked(kind)),
        "gradients": BYTES * summed * trained,
        "moments": BYTES * (states + averages * updated) * trained,
        "tables": NUMBER * numbers * trained,
        "snapshot": saved_bytes(case, unit, own) * case.async_save,
    }


def saved_bytes(case: Case, unit: Unit, own: int) -> int:
    """What goes into a checkpoint of `own` elements of a unit: parameters, moments, averages."""
    trained, averages = unit.trainable, case.ema is not None
    return BYTES * own * ((1 + averages) * (trained or case.model.lora is None) + state_count(unit) * trained)


def keeps_slices(case: Case) -> bool:
    """Whether a rank counts its slices of parameters alone."""
    shared = case.shares_wholes and case.strategy.shards_moments
    return shared or case.strategy.shards_parameters


def reductions(case: Case) -> Reductions:
    """What the transport of a case is asked to reduce."""
    rounds, slices = case.rounds, tuple(own for _, own in case.trained)
    return Reductions(
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


def node_shared(case: Case) -> int:
    """Bytes of a node's shared windows: wholes or gathered units once, gradients of each rank, counters."""
    if not case.transport.shares_memory:
        return 0
    layout, wholes = case.layout, list[int]()
    if case.shares_wholes:
        wholes = [whole.length for whole in layout.wholes(case.strategy, case.owners)]
    once = layout.gathers if case.shares_gathers else wholes
    return window_bytes(once, layout.buffers, case.per_node) + RANK_BYTES * case.per_node


# Bytes of a rank's own (interpreter, NumPy, MPI) and of the files that a node's ranks share; with compiled
# operations, and the compiler while one rank fills the folder of compiled code for the first time.
PLAIN_RANK, PLAIN_FILES = 44 << 20, 22 << 20
RANK, FILES, COMPILER = 88 << 20, 96 << 20, 64 << 20
STEP = 1 << 24  # what is asked for is a multiple of so many bytes
BYTES_OF_TOKEN = 3  # of text, where a token is not a byte
READING = 2  # times the tokens, beside them, while rank 0 reads them


@dataclass(frozen=True)
class Resident:
    """Bytes of a node."""

    programs: int = called("programs and libraries")  # interpreters, and the compiler
    mpi: int = called("MPI's own segments")
    text: int = called("tokens of the text")  # on all ranks
    arrays: int = called("arrays, as planned")  # on the host, of all ranks
    sample: int = called("sample in the end")  # the whole model on rank 0

    @property
    def total(self) -> int:
        """When most of it is there."""
        return int(sum(asdict(self).values()))

    @property
    def ask(self) -> int:
        """What to ask for."""
        return -(-self.total // STEP) * STEP


def resident(case: Case, memory: Memory, text: int, sample: bool) -> Resident:
    """Of a node; `text`: bytes of all tokens; `sample`: whether rank 0 shows one."""
    ranks = case.per_node
    return Resident(
        programs=programs(ranks),
        mpi=ranks * WITH_UCX,
        text=ranks * text + max(0, READING * text - ranks * private(case, memory)),
        arrays=ranks * private(case, memory) + memory.node_shared,
        sample=4 * elements(case.model) * sample,
    )


def programs(ranks: int) -> int:
    """Bytes of interpreters and libraries of so many ranks of a node, and of the compiler."""
    if ops.backend() == "numpy":
        return ranks * PLAIN_RANK + PLAIN_FILES
    return ranks * RANK + FILES + COMPILER


def private(case: Case, memory: Memory) -> int:
    """Bytes of the host that the plan counts for a rank, but for those that it shares with its node."""
    if case.on_gpu:
        return memory.host
    shared = memory.gathered * case.shares_gathers + memory.gradient_buffers * case.transport.shares_memory
    if case.transport.shares_memory and case.shares_wholes:
        shared += memory.parameters if case.strategy.shards_moments else memory.gradients
    return memory.total - shared


def text_bytes(config: Config, model: ModelConfig) -> int:
    """Of the tokens that each rank holds, by the sizes of the data's files, which are not read.

    Those of token files, and of text that is kept once it is encoded, stay on disk.
    """
    lists = [files_of(config.data) if config.data else library_files()]
    lists += [files_of(config.val_data)] if config.val_data else []
    return sum(held_bytes(files, model.vocab_size) for files in lists)


def held_bytes(files: Sequence[tuple[str, Path]], vocabulary: int) -> int:
    """Of the ids that are read of such files and held."""
    tokens = token_files(files)
    found = sum(path.stat().st_size for _, path in tokens or files)
    width = 2 if vocabulary <= 1 << 16 else 4
    ids = found if tokens else width * found // (1 if vocabulary <= 300 else BYTES_OF_TOKEN)
    in_files = bool(tokens) or (found >= LEAST and folder() is not None)
    return 0 if in_files and ids > MOST_HELD else ids


def text_of(corpus: Corpus) -> int:
    """The same of a corpus that has been read."""
    return sum(part.stream.nbytes for part in (*corpus.parts, *corpus.held_out))
