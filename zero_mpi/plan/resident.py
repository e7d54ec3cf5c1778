"""What all ranks of a node take of the host's memory together: what to ask a batch system for.

Beside what a plan counts, a rank has its interpreter, NumPy, compiled operations and the text; a node has
the files of libraries once, MPI's segments, what its ranks share, and for a while the compiler. These were
measured (x86-64, Python 3.11, MPICH 5.0, 1 to 8 ranks) as resident pages, shared ones counted once, and a
test holds runs against the sum. What ranks share is in the plan of a rank by its part, and here once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zero_mpi import ops
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
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import Memory, called

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
