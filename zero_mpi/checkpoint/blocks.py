"""How tensors are read that stay in the blocks of their file."""

from __future__ import annotations

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.state import finite
from zero_mpi.checkpoint.tensor_file import CHUNK
from zero_mpi.device.types import Array
from zero_mpi.ops.block_kinds import BLOCK_KINDS
from zero_mpi.sharding.block_parameters import ReadBytes


def finite_blocks(file: GGUFFile) -> ReadBytes:
    """read(name, start, out) of stored bytes, which raises UsageError for values that are not finite."""
    values = finite(file.read, file.path)

    def read(name: str, start: int, out: Array) -> None:
        kind, size = BLOCK_KINDS[file.tensors[name].type.name], file.tensors[name].size
        first, last = start // kind.nbytes, -(-(start + out.size) // kind.nbytes)
        for at in range(first * kind.elements, last * kind.elements, CHUNK):
            values(name, at, min(at + CHUNK, last * kind.elements, size))
        file.read_bytes(name, start, out)

    return read
