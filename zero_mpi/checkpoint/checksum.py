"""Checksums of tensors that any number of ranks can work out together.

A tensor's digest is the sha256 of the XXH3 (128 bits) of its pieces of 4096 bytes, in their order. 4096
bytes are the 1024 float32 elements at whose multiples slices end, so each rank digests the pieces of its own
slice and no rank has to see the whole. XXH3 finds what disks and memory do to bits, at memory speed; sha256
alone would be slower than a good disk. Neither protects from somebody who changes a file and signs it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from xxhash import xxh3_128_digest

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
