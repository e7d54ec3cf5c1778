"""Writes the files of a checkpoint from all ranks, in pieces.

Slices are brought to rank 0 piece by piece, or each rank writes its own where they belong (`parallel`). While
one piece is written, by a thread, the next is digested and brought: rank 0 needs room for two pieces, which
are half a unit each at most. The headers hold the digests of all tensors, whose length is known before their
values, so they are written last. A failure of any rank is raised on all of them, at the end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint.checksum import PIECE_BYTES, digest, digest_of_pieces, piece_digests
from zero_mpi.checkpoint.gguf.header import pack_file
from zero_mpi.checkpoint.shards import Contribution, Run
from zero_mpi.comm import Comm, OutputFile, PlainFile
from zero_mpi.device.arrays import empty
from zero_mpi.device.types import Array
from zero_mpi.errors import JobError, explain
from zero_mpi.sharding.unit import BYTES

PIECE_ELEMENTS = 1 << 21  # elements of a piece: 8 MiB, large for a disk and small for memory
BLANK = "0" * 64  # holds the place of a digest
READ_AT_ONCE = 1 << 22  # bytes read at a time

Digests = dict[str, str]


@dataclass(frozen=True)
class Content:
    """What goes into one file: (name, shape) in the file's order, and who gives the values.

    `constants` are tensors that all ranks have; rank 0 writes them.
    """

    path: Path
    architecture: str
    tensors: Sequence[tuple[str, tuple[int, ...]]]
    contributions: Sequence[Contribution]
    constants: Mapping[str, Array] = field(default_factory=dict)


Stamp = Callable[[Digests, Digests], Sequence[Mapping[str, Any]]]
"""From the digests of each file's tensors to the keys of each."""


class Output:
    """One file on its way, on one rank; `problem` is the first error, after which it only plays along."""

    def __init__(self, comm: Comm, content: Content, keys: Mapping[str, Any], parallel: bool) -> None:
        self.comm, self.content = comm, content
        header, self._offsets, self.nbytes = pack_file(content.architecture, dict(keys), content.tensors)
        self._header_bytes = len(header)
        self.problem: OSError | None = None
        self._file: OutputFile | None = None
        self.attempt(self._open, parallel)

    def _open(self, parallel: bool) -> None:
        if parallel:
            self._file = self.comm.create_file(self.content.path)
        elif self.comm.rank == 0:
            self._file = PlainFile(self.content.path)

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """action(*arguments), unless something failed before; an OSError is kept."""
        if self.problem is None:
            try:
                action(*arguments)
            except OSError as error:
                self.problem = error

    def resize(self) -> None:
        """Give the file its length, so that gaps between tensors are zeros."""
        if self._file is not None:
            self.attempt(self._file.resize, self.nbytes)

    def write(self, name: str, first: int, values: Array) -> None:
        """Elements of a tensor from its element `first` on."""
        self.put(self._offsets[name] + first * BYTES, values)

    def put(self, offset: int, data: Array | bytes) -> None:
        """Bytes at a place of the file."""
        if self._file is not None:
            self.attempt(self._file.write_at, offset, data)

    def stamp(self, keys: Mapping[str, Any]) -> None:
        """Write the header with its final keys, as long as the first ones."""
        header, _, _ = pack_file(self.content.architecture, dict(keys), self.content.tensors)
        assert len(header) == self._header_bytes, "the keys of a header changed their length"
        self.put(0, header)

    def close(self, durable: bool) -> None:
        """Close the file, brought to disk if it is to stay."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close(durable)
            except OSError as error:
                self.problem = self.problem or error

    def read_digest(self, name: str, nbytes: int) -> str:
        """The digest of a tensor as it stands in the file."""
        with self.content.path.open("rb") as file:
            file.seek(self._offsets[name])
            sizes = [min(READ_AT_ONCE, nbytes - at) for at in range(0, nbytes, READ_AT_ONCE)]
            return digest_of_pieces(piece_digests(file.read(size)) for size in sizes)


class Pieces:
    """The pieces of a file on their way to it: one is written while the next is prepared."""

    def __init__(self, output: Output, thread: ThreadPoolExecutor, direct: bool) -> None:
        self.output, self.comm, self._thread, self._direct = output, output.comm, thread, direct
        self._pending: deque[Future[None]] = deque()
        self._rooms, self._turn = [empty(0), empty(0)], 0

    def send(self, given: Contribution) -> list[tuple[str, bytes]]:
        """Bring one contribution of all ranks into the file. Returns the digests of this rank's pieces."""
        digests: list[tuple[str, bytes]] = []
        for piece in given.partition.cut(self._length(given)):
            inside = piece.of_slice(given.partition, self.comm.rank)
            mine, start = given.on_host(inside), given.partition.bounds[self.comm.rank] + inside.start
            if given.by_pieces:
                digests += given.digests(start, mine)
            if self._direct:
                self._write(given, start, mine)
            else:
                room = self._room(given)[: piece.stop - piece.start] if self.comm.rank == 0 else None
                self.comm.gather(mine, room, piece, label=f"checkpoint {given.prefix}{given.unit.name}")
                if room is not None:
                    self._write(given, piece.start, room)
        return digests

    def _length(self, given: Contribution) -> int:
        """Elements of a piece: two rooms are at most a unit, and digests' pieces stay whole."""
        quantum = PIECE_BYTES // BYTES
        return min(PIECE_ELEMENTS, -(-given.unit.length // 2 // quantum) * quantum) or quantum

    def _room(self, given: Contribution) -> Array:
        """Room for a piece: the one that was not used last, once what was in it is written."""
        self._wait(1)
        self._turn = 1 - self._turn
        if self._rooms[self._turn].size < self._length(given):
            self._rooms[self._turn] = empty(self._length(given))
        return self._rooms[self._turn]

    def _write(self, given: Contribution, start: int, values: Array) -> None:
        self._wait(1)
        self._pending.append(self._thread.submit(self._write_runs, list(given.runs(start, values))))

    def _write_runs(self, runs: Iterable[Run]) -> None:
        for name, first, values in runs:
            self.output.write(name, first, values)

    def _wait(self, most: int) -> None:
        """Return when at most so many pieces are under way."""
        while len(self._pending) > most:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Return when all pieces are written."""
        self._wait(0)


def write_together(
    comm: Comm, contents: Sequence[Content], stamp: Stamp, *, parallel: bool, tick: Callable[[str], None]
) -> None:
    """Write all files and bring them to disk. Collective; raises JobError on all ranks if one fails.

    `tick` is told what is going on, again and again.
    """
    blank = [dict.fromkeys([name for name, _ in content.tensors], BLANK) for content in contents]
    outputs = [
        Output(comm, content, keys, parallel) for content, keys in zip(contents, stamp(*blank), strict=True)
    ]
    agree(comm, outputs)
    for output in outputs:
        output.resize()
    with ThreadPoolExecutor(1, "zero_mpi checkpoint") as thread:
        digests = [write_tensors(output, thread, parallel or comm.size == 1, tick) for output in outputs]
    if comm.rank == 0:
        for output, keys in zip(outputs, stamp(*digests), strict=True):
            output.stamp(keys)
    agree(comm, outputs)  # before the collective close: all ranks go the same way
    for output in outputs:
        tick(f"bringing {output.content.path.name} to disk")
        output.close(durable=True)
    agree(comm, outputs)


def agree(comm: Comm, outputs: Iterable[Output]) -> None:
    """Raise JobError on all ranks if any of them had a problem; what is open is closed first."""
    problems = [output.problem for output in outputs if output.problem is not None]
    try:
        agree_on(comm, explain(problems[0]) if problems else None)
    except JobError:
        for output in outputs:
            output.close(durable=False)
        raise


def agree_on(comm: Comm, problem: str | None) -> None:
    """Raise the first rank's problem as JobError on all ranks, if any has one. Collective."""
    for rank, text in enumerate(comm.allgather_object(problem)):
        if text:
            raise JobError(f"rank {rank}: {text}" if rank else text)


def write_tensors(
    output: Output, thread: ThreadPoolExecutor, direct: bool, tick: Callable[[str], None]
) -> Digests:
    """Bring all tensors of a file into it. Returns their digests, on rank 0 only. Collective."""
    pieces, digests, odd = Pieces(output, thread, direct), dict[str, str](), list[str]()
    for given in output.content.contributions:
        tick(f"writing {given.prefix}{given.unit.name} to {output.content.path.name}")
        found = output.comm.gather_object(pieces.send(given))
        if given.by_pieces:
            digests |= joined(found or [])
        else:
            odd += [given.prefix + name for name in given.unit.params]
    pieces.finish()
    for name, constant in output.content.constants.items() if output.comm.rank == 0 else ():
        output.write(name, 0, constant)
        digests[name] = digest(constant)
    digests |= digests_from_file(output, odd)
    return {name: digests.get(name, BLANK) for name, _ in output.content.tensors}


def joined(found: Sequence[Sequence[tuple[str, bytes]]]) -> Digests:
    """Digests from those of pieces, which the ranks hold in the order of the tensors' elements."""
    parts = defaultdict[str, list[bytes]](list)
    for name, pieces in (entry for rank in found for entry in rank):
        parts[name].append(pieces)
    return {name: digest_of_pieces(pieces) for name, pieces in parts.items()}


def digests_from_file(output: Output, names: Sequence[str]) -> Digests:
    """Digests of tensors whose slices cut pieces (row sharding): read back on rank 0, once all is written."""
    if names:
        output.comm.barrier()
    if not names or output.comm.rank != 0 or output.problem is not None:
        return dict.fromkeys(names, BLANK)
    shapes, digests = dict(output.content.tensors), dict.fromkeys(names, BLANK)

    def read_all() -> None:
        for name in names:
            digests[name] = output.read_digest(name, BYTES * int(np.prod(shapes[name])))

    output.attempt(read_all)
    return digests
