"""Whether the files of a checkpoint are those that were written, all of them together.

All hold the same id, which stands for every key of all, and the digests of their own tensors; optimizer.gguf
also those of the others. What one bit changed, or files of two checkpoints, shows.

A tensor's digest is the sha256 of the XXH3 (128 bits) of its pieces of 4096 bytes, in their order. 4096
bytes are the 1024 float32 elements at whose multiples slices end, so each rank digests the pieces of its own
slice and no rank has to see the whole. XXH3 finds what disks and memory do to bits, at memory speed; sha256
alone would be slower than a good disk. Neither protects from somebody who changes a file and signs it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.header import ARCHITECTURE_KEY, pack_key
from zero_mpi.checkpoint.gguf.index import CHECKPOINT_ID
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import GGUFKeys

PIECE_BYTES = 4096  # bytes

Data = Any  # a C-contiguous array, bytes or a memoryview; Python 3.11 has no name for buffers


def piece_digests(data: Data) -> bytes:
    """The digests of the pieces of `data` (C-contiguous), one after the other; the last may be short."""
    view = memoryview(data).cast("B")
    return b"".join([xxh3_128_digest(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES)])


def digest_of_pieces(pieces: Iterable[bytes]) -> str:
    """A tensor's digest (hex) from the digests of its pieces, in order, in as many parts as they come."""
    total = hashlib.sha256()
    for part in pieces:
        total.update(part)
    return total.hexdigest()


def digest(data: Data) -> str:
    """The digest (hex) of a whole tensor's bytes."""
    return digest_of_pieces([piece_digests(data)])


def digest_of_state(digests: Mapping[str, str]) -> str:
    """One digest for many tensors: over the lines "digest name", in order of names."""
    lines = "".join(f"{value} {name}\n" for name, value in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def as_lines(digests: Mapping[str, str]) -> list[str]:
    """How digests are kept in a GGUF: strings "digest name"."""
    return [f"{value} {name}" for name, value in digests.items()]


def from_lines(lines: Iterable[str] | None) -> dict[str, str]:
    """Name -> digest from such strings; empty where there are none."""
    texts = [line for line in (() if lines is None else lines) if isinstance(line, str)]
    return {name: value for value, _, name in (line.partition(" ") for line in texts)}


FORMAT_VERSION = 2
ID, STATE_DIGEST = CHECKPOINT_ID, "training.state_digest"
TENSOR_DIGESTS = "training.tensor_digests"
MODEL, AVERAGE = "model", "ema"  # roles of files beside optimizer.gguf
DIGESTS = {MODEL: "training.model_digests", AVERAGE: "training.ema_digests"}  # its keys for theirs
READ_AT_ONCE = 1 << 22  # bytes digested at a time


@dataclass(frozen=True)
class CheckpointFiles:
    """The indices of a checkpoint's files: the model or adapters, the optimizer's state, their average."""

    model: WeightSource
    state: GGUFFile
    average: GGUFFile | None = None

    @property
    def weights(self) -> dict[str, WeightSource]:
        """What the state answers for, by role."""
        found = {MODEL: self.model}
        return found if self.average is None else {**found, AVERAGE: self.average}


def open_checkpoint(folder: Path) -> CheckpointFiles:
    """The indices of all files; raises UsageError if one is not sound or they do not belong together."""
    model, state = GGUFFile.open(folders.weights_in(folder)), GGUFFile.open(folder / folders.OPTIMIZER)
    files = CheckpointFiles(model, state, average_beside(state))
    check_files(files)
    return files


def average_beside(state: GGUFFile) -> GGUFFile | None:
    """The index of the average, if the state speaks of one."""
    return GGUFFile.open(state.path.parent / folders.AVERAGE) if DIGESTS[AVERAGE] in state.metadata else None


def keys_of(file: WeightSource) -> GGUFKeys:
    """The keys of a file, read with their types."""
    return GGUFKeys(file.metadata, str(file.path))


def check_files(files: CheckpointFiles) -> None:
    """Raise UsageError unless the files are parts of one checkpoint and say what was written."""
    state, version = files.state, keys_of(files.state).whole("optimizer.file_version")
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{state.path}: expected a training state of version {FORMAT_VERSION}, found {version}"
        )
    own = keys_of(state).text(ID)
    for file in files.weights.values():
        found = keys_of(file).text(ID)
        if found is None or found != own:
            raise UsageError(
                f"{state.path.parent}: {file.path.name} and {folders.OPTIMIZER} are not of one checkpoint "
                f"(ids {show(str(found))} and {show(str(own))})"
            )
    check_signature(files)


def signature(*files: Mapping[str, Any]) -> str:
    """The id of a checkpoint: a hash of all other keys of all files, digests of tensors included."""
    total = hashlib.sha256()
    for keys in files:
        for key in sorted(keys.keys() - {ID, ARCHITECTURE_KEY}):
            total.update(pack_key(key, keys[key]))
    return total.hexdigest()[:32]


def check_signature(files: CheckpointFiles) -> None:
    """Raise UsageError unless all files say what was written: sizes, tokenizer, progress, settings, ..."""
    state, weights = files.state, files.weights
    if signature(*(file.metadata for file in (*weights.values(), state))) != state.metadata[ID]:
        names = ", ".join(file.path.name for file in weights.values())
        raise UsageError(
            f"{state.path.parent}: {names} or {folders.OPTIMIZER} has a key that is not the one "
            "that was written"
        )
    for role, file in weights.items():
        recorded = from_lines(keys_of(state).texts(DIGESTS[role]))
        if from_lines(keys_of(file).texts(TENSOR_DIGESTS)) != recorded:
            raise UsageError(f"{file.path}: the key {TENSOR_DIGESTS} is not the one that was written")


def digest_of_files(digests: Mapping[str, Mapping[str, str]]) -> str:
    """One digest for all tensors of all files, by role; an average has the names of the model's tensors."""
    return digest_of_state(
        {
            f"{role}.{name}" if role == AVERAGE else name: digest
            for role, found in digests.items()
            for name, digest in found.items()
        }
    )


def check_digests(
    files: CheckpointFiles, rank: int = 0, ranks: int = 1, beat: Callable[[], object] = lambda: None
) -> None:
    """Raise UsageError unless the files hold the tensors that were written; this rank's share of them.

    All `ranks` together look at every tensor once; `beat` is called before each.
    """
    keys = keys_of(files.state)
    recorded = [(file, from_lines(keys.texts(DIGESTS[role]))) for role, file in files.weights.items()]
    recorded.append((files.state, from_lines(keys.texts(TENSOR_DIGESTS))))
    expected = [
        (file, name, digests.get(name))
        for file, digests in recorded
        for name in [*file.tensors, *(name for name in digests if name not in file.tensors)]
    ]
    for file, name, digest in expected[rank::ranks]:
        beat()
        assert isinstance(file, GGUFFile), "a checkpoint is written as GGUF"
        pieces = file.raw_pieces(name, READ_AT_ONCE) if name in file.tensors else ()
        if name not in file.tensors or digest_of_pieces(map(piece_digests, pieces)) != digest:
            raise UsageError(
                f"{file.path}: tensor {show(name)} is not the one that was written (its checksum differs)"
            )
