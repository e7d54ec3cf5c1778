"""Checks that the files of a checkpoint are unchanged and belong together.

Every file holds the id of the checkpoint, which is a hash of the keys of all files, and the digests of its
tensors. optimizer.gguf also holds the digests of the other files. So a single changed bit is detected, and so
is a mixture of files from two checkpoints.

A tensor's digest is the sha256 of the 128-bit XXH3 hashes of its pieces of 4096 bytes, in order. 4096 bytes
are 1024 float32 elements, and slices end at multiples of 1024 (except row shards). So each rank hashes the
pieces of its slice, and no rank needs the full tensor. XXH3 hashes at the speed of memory and detects errors
of disks and memory. A sha256 of all bytes would be slower than a good disk. Deliberate changes may pass.
"""

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
from zero_mpi.checkpoint.weights import WeightSource, keys_of
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show

PIECE_BYTES = 4096  # size of a piece

Data = Any  # a C-contiguous array, bytes or a memoryview; Python 3.11 cannot express this type


def piece_digests(data: Data) -> bytes:
    """Return the joined digests of the pieces of `data` (C-contiguous). The last piece may be short."""
    view = memoryview(data).cast("B")
    return b"".join([xxh3_128_digest(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES)])


def digest_of_pieces(chunks: Iterable[bytes]) -> str:
    """Return a tensor's digest (hex), given the digests of its pieces in order, in chunks of any size."""
    total = hashlib.sha256()
    for part in chunks:
        total.update(part)
    return total.hexdigest()


def digest(data: Data) -> str:
    return digest_of_pieces([piece_digests(data)])


def as_lines(digests: Mapping[str, str]) -> list[str]:
    """Return digests as the value of a GGUF key: strings "digest name"."""
    return [f"{value} {name}" for name, value in digests.items()]


def from_lines(lines: Iterable[str] | None) -> dict[str, str]:
    """Return name -> digest, given strings "digest name"; {} for None."""
    return {name: value for value, _, name in (line.partition(" ") for line in lines or ())}


FORMAT_VERSION = 2
ID, STATE_DIGEST = CHECKPOINT_ID, "training.state_digest"
TENSOR_DIGESTS = "training.tensor_digests"
MODEL, AVERAGE = "model", "ema"  # roles of all files except optimizer.gguf
DIGESTS = {MODEL: "training.model_digests", AVERAGE: "training.ema_digests"}  # keys of their digests
READ_AT_ONCE = 1 << 22  # bytes of a chunk that is read and hashed


@dataclass(frozen=True)
class CheckpointFiles:
    """Indices of a checkpoint's files: the model or adapter, the optimizer's state, the average if any."""

    model: WeightSource
    state: GGUFFile
    average: GGUFFile | None = None

    @property
    def weights(self) -> dict[str, WeightSource]:
        """Role -> file, for the files whose digests are in optimizer.gguf."""
        files = {MODEL: self.model}
        return files if self.average is None else {**files, AVERAGE: self.average}


def open_checkpoint(folder: Path) -> CheckpointFiles:
    """Open the indices of a checkpoint. Raise UsageError if one is damaged or they do not belong together."""
    model, state = GGUFFile.open(folders.weights_in(folder)), GGUFFile.open(folder / folders.OPTIMIZER)
    files = CheckpointFiles(model, state, average_of(state))
    check_files(files)
    return files


def average_of(state: GGUFFile) -> GGUFFile | None:
    return GGUFFile.open(state.path.parent / folders.AVERAGE) if DIGESTS[AVERAGE] in state.metadata else None


def check_files(files: CheckpointFiles) -> None:
    """Raise UsageError unless the files belong to one checkpoint and none of their keys was changed."""
    state, version = files.state, keys_of(files.state).integer("optimizer.file_version")
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{state.path}: expected a training state of version {FORMAT_VERSION}, found {version}"
        )
    state_id = keys_of(state).text(ID)
    for file in files.weights.values():
        file_id = keys_of(file).text(ID)
        if file_id is None or file_id != state_id:
            raise UsageError(
                f"{state.path.parent}: {file.path.name} and {folders.OPTIMIZER} belong to different "
                f"checkpoints (ids {show(str(file_id))} and {show(str(state_id))})"
            )
    if signature(*(file.metadata for file in (*files.weights.values(), state))) != state.metadata[ID]:
        names = ", ".join(file.path.name for file in files.weights.values())
        raise UsageError(
            f"{state.path.parent}: {names} or {folders.OPTIMIZER} has a key that was changed after it was "
            "written"
        )
    for role, file in files.weights.items():
        recorded = from_lines(keys_of(state).texts(DIGESTS[role]))
        if from_lines(keys_of(file).texts(TENSOR_DIGESTS)) != recorded:
            raise UsageError(f"{file.path}: the key {TENSOR_DIGESTS} was changed after it was written")


def signature(*files: Mapping[str, Any]) -> str:
    """Return a checkpoint's id: a hash of all files' keys, digests too, except id and architecture."""
    total = hashlib.sha256()
    for keys in files:
        for key in sorted(keys.keys() - {ID, ARCHITECTURE_KEY}):
            total.update(pack_key(key, keys[key]))
    return total.hexdigest()[:32]


def digest_of_files(digests: Mapping[str, Mapping[str, str]]) -> str:
    """Return one digest of all tensors: a hash of the lines "digest name". Names of averages get a prefix."""
    by_name = {
        f"{role}.{name}" if role == AVERAGE else name: digest
        for role, entries in digests.items()
        for name, digest in entries.items()
    }
    lines = "".join(f"{digest} {name}\n" for name, digest in sorted(by_name.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def check_digests(
    files: CheckpointFiles, rank: int = 0, ranks: int = 1, beat: Callable[[], object] = lambda: None
) -> None:
    """Raise UsageError if a tensor was changed. This rank checks only its share of the tensors.

    All `ranks` together check each tensor once. `beat` is called before each tensor.
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
        assert isinstance(file, GGUFFile), "expected only GGUF files"
        chunks = file.raw_chunks(name, READ_AT_ONCE) if name in file.tensors else ()
        if name not in file.tensors or digest_of_pieces(map(piece_digests, chunks)) != digest:
            raise UsageError(
                f"{file.path}: tensor {show(name)} was changed after it was written (its checksum differs)"
            )
