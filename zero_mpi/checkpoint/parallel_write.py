"""Writes the files of a checkpoint from all ranks, chunk by chunk.

Slices are sent in chunks to the ranks that write (`Writers`). A rank that writes only its own slices does not
copy them. While a thread writes one chunk, the next chunk is hashed and sent. So a writer has buffers for two
chunks, each of about half a unit at most. The headers hold the digests of all tensors. Since the length of a
header does not depend on the digests, rank 0 can write the headers last. Then each host syncs the data that
it wrote. If any rank fails, all ranks raise its error.
"""

import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint.gguf.header import TableRow, checked_table, pack_file
from zero_mpi.checkpoint.sound import PIECE_BYTES, READ_AT_ONCE, digest, digest_of_pieces, piece_digests
from zero_mpi.checkpoint.state import Contribution, Run
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.comm import Chunk, Comm, Partition, SerialComm
from zero_mpi.comm.base import members_of
from zero_mpi.device.arrays import empty
from zero_mpi.device.types import Array
from zero_mpi.errors import JobError, explain, naming
from zero_mpi.files.file_systems import FileSystem, file_system
from zero_mpi.files.open import open_in_place


@dataclass(frozen=True)
class Writers:
    """Assignment of ranks to writers: the node of each rank of `comm`, and the rank that writes its slices.

    A `group` consists of the ranks with the same writer, which is its first rank. The number of writers
    suits the file system (`files.file_systems`). Only the host that wrote data can sync it, and the processes
    of a host share its cache. So after all ranks have written, one writer of each host syncs each file once.
    """

    comm: Comm
    group: Comm
    nodes: tuple[int, ...]
    writer_of: tuple[int, ...]
    description: str = "rank 0 writes"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        number = self.writer_of[self.comm.rank]
        return tuple(rank for rank, writer in enumerate(self.writer_of) if writer == number)

    @property
    def writes(self) -> bool:
        return self.writer_of[self.comm.rank] == self.comm.rank

    @property
    def syncs(self) -> bool:
        """True if this rank is the first writer of its node, which syncs files."""
        writers = [writer for writer in self.writer_of if self.nodes[writer] == self.nodes[self.comm.rank]]
        return self.writes and self.comm.rank == min(writers)

    def close(self) -> None:
        """Close the group's transport. Collective."""
        if self.group is not self.comm:
            self.group.close()


def rank_0_of(comm: Comm) -> Writers:
    """Return Writers with rank 0 as the only writer, to which all ranks send their slices."""
    return Writers(comm, comm, (0,) * comm.size, (0,) * comm.size)


def writers_for(comm: Comm, folder: Path, per_node: int | None = None) -> Writers:
    """Return the writers that suit `folder`'s file system, or `per_node` writers per node. Collective."""
    nodes = tuple(comm.nodes())
    system: FileSystem = comm.broadcast_object(file_system(folder) if comm.rank == 0 else None)
    writer_of = writer_of_each(nodes, system, per_node)
    count = len(set(writer_of))
    group = comm if count == 1 else SerialComm() if count == comm.size else comm.split(writer_of[comm.rank])
    return Writers(comm, group, nodes, writer_of, f"{count} of {comm.size} ranks write, on {system.kind}")


def writer_of_each(nodes: Sequence[int], system: FileSystem, per_node: int | None = None) -> tuple[int, ...]:
    """Return the writer of each rank: the rank that writes its slices. `nodes`: the node of each rank.

    `per_node`: maximum number of writers per node; None: the number that suits the file system. If only one
    host may write to a file, rank 0 writes for all; on an unknown file system, `per_node` overrides this.
    """
    several = len(set(nodes)) > 1
    if several and not system.hosts and (system.is_known or per_node is None):
        return (0,) * len(nodes)
    writer_of = list(range(len(nodes)))
    for ranks in members_of(nodes).values():
        groups = Partition(len(ranks), min(per_node or system.writers or len(ranks), len(ranks)))
        for number in range(groups.parts):
            for rank in ranks[groups.part(number)]:
                writer_of[rank] = ranks[groups.bounds[number]]
    return tuple(writer_of)


@dataclass(frozen=True)
class JoinedSlices(Partition):
    """Slices of several ranks, one after the other, as if they were one buffer."""

    slices: tuple[slice, ...] = ()

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Start of each slice in the joined buffer, followed by the end of the last slice."""
        return tuple(accumulate((part.stop - part.start for part in self.slices), initial=0))

    def segments(self, chunk: Chunk) -> list[tuple[int, slice]]:
        """Return (start in the unit's buffer, range in the chunk) of each slice; the range may be empty."""
        segments, at = list[tuple[int, slice]](), 0
        for number, part in enumerate(self.slices):
            overlap = chunk.of_slice(self, number)
            size = overlap.stop - overlap.start
            segments.append((part.start + overlap.start, slice(at, at + size)))
            at += size
        return segments


def share_of(partition: Partition, ranks: Sequence[int]) -> JoinedSlices:
    """Return the joined slices of `ranks`, which are in ascending order."""
    slices = tuple(partition.part(rank) for rank in ranks)
    return JoinedSlices(sum(part.stop - part.start for part in slices), len(slices), slices=slices)


CHUNK_ELEMENTS = 1 << 21  # maximum elements of a chunk: 8 MiB of float32, which a disk writes efficiently
BLANK = "0" * 64  # placeholder for a digest in a header
DISK_BYTES = 16 << 20  # number of bytes after which the system is asked to write them to disk
MOST_BUFFERS = 1024  # maximum number of buffers in one system call
PADDING = 64  # tensors with at most this many zero bytes between them are written in one call

Digests = dict[str, str]


@dataclass(frozen=True)
class Content:
    """Content of a file: (name, shape, type) of its tensors in order, and contributions to their values."""

    path: Path
    architecture: str
    tensors: Sequence[TableRow]
    contributions: Sequence[Contribution]
    constants: Mapping[str, Array] = field(default_factory=dict)  # equal on all ranks; rank 0 writes them


Stamp = Callable[[Digests, Digests], Sequence[Mapping[str, Any]]]
"""Function from the digests of each file's tensors to the keys of each file."""


class OutputFile:
    """A file that is open for writing. Either this rank creates it (`new`), or another rank has created it.

    We use system calls instead of MPI-IO, because MPI's Sync flushes a file once per rank and not once per
    host. Adjacent data is written in one call, and an OSError names the file. The ranges that ranks write do
    not overlap.
    """

    def __init__(self, path: Path, new: bool = True) -> None:
        self.path = path
        self._handle = open_in_place(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC) * new)
        self._unflushed = 0  # bytes written since the system was last asked to write to disk

    def resize(self, nbytes: int) -> None:
        """Set the length of the file. Bytes that no rank writes are zeros."""
        with naming(self.path):
            os.ftruncate(self._handle, nbytes)

    def write_at(self, offset: int, *data: Array | bytes) -> None:
        """Write all items of `data` (C-contiguous) in order, beginning at byte `offset`. Thread-safe."""
        views, first = deque(memoryview(part).cast("B") for part in data), offset
        with naming(self.path):
            while views:
                count = os.pwritev(self._handle, list(islice(views, MOST_BUFFERS)), offset)
                offset += count
                while views and count >= len(views[0]):
                    count -= len(views.popleft())
                if count:
                    views[0] = views[0][count:]
        self._unflushed += offset - first
        if self._unflushed >= DISK_BYTES:
            # We tell the system that it need not cache these bytes any more. So it writes them to disk now,
            # while other work continues, and not only at the end. Bytes that are not yet on disk stay in the
            # cache. A file system may reject this advice.
            self._unflushed = 0
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Flush to disk all bytes that processes of this host wrote."""
        with naming(self.path):
            os.fsync(self._handle)

    def close(self, durable: bool = True) -> None:
        """Close the file, after a sync if `durable`. A second call does nothing."""
        if self._handle < 0:
            return
        try:
            if durable:
                self.sync()
        finally:
            handle, self._handle = self._handle, -1
            with naming(self.path):
                os.close(handle)


class Output:
    """A file that this rank helps to write. After its first error (`problem`) it only joins collectives."""

    def __init__(self, writers: Writers, content: Content, keys: Mapping[str, Any]) -> None:
        self.writers, self.comm, self.content = writers, writers.comm, content
        header, self._offsets, self._nbytes = pack_file(content.architecture, dict(keys), content.tensors)
        self._header_bytes = len(header)
        self.problem: OSError | None = None
        self._file: OutputFile | None = None
        if self.comm.rank == 0:
            self.attempt(self.open)

    def open(self) -> None:
        """Open the file; rank 0 creates it."""
        self._file = OutputFile(self.content.path, new=self.comm.rank == 0)
        if self.comm.rank == 0:
            self._file.resize(self._nbytes)

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call action(*arguments), unless an earlier call failed. Store an OSError as `problem`."""
        if self.problem is None:
            try:
                action(*arguments)
            except OSError as error:
                self.problem = error

    def write(self, runs: Iterable[Run]) -> None:
        """Write runs of tensors. Runs that are adjacent in the file are written together."""
        start, end, parts = 0, 0, list[Array | bytes]()
        for name, first, values in runs:
            offset = self._offsets[name] + first * values.itemsize
            if parts and 0 <= offset - end <= PADDING:
                parts += [bytes(offset - end)] * (offset > end)
            else:
                self.put(start, *parts)
                start, parts = offset, []
            parts.append(values)
            end = offset + values.nbytes
        self.put(start, *parts)

    def put(self, offset: int, *data: Array | bytes) -> None:
        if self._file is not None and data:
            self.attempt(self._file.write_at, offset, *data)

    def stamp(self, keys: Mapping[str, Any]) -> None:
        """Write the header again with its final keys, which must not change its length."""
        header, _, _ = pack_file(self.content.architecture, dict(keys), self.content.tensors)
        assert len(header) == self._header_bytes, "the length of the header changed"
        self.put(0, header)

    def close(self, durable: bool) -> None:
        """Close the file. If `durable`, one writer of each host syncs it first."""
        if self._file is not None:
            try:
                self._file.close(durable and self.writers.syncs)
            except OSError as error:
                self.problem = self.problem or error

    def read_digest(self, spec: TensorSpec) -> str:
        with self.content.path.open("rb") as file:
            file.seek(self._offsets[spec.name])
            sizes = [min(READ_AT_ONCE, spec.nbytes - at) for at in range(0, spec.nbytes, READ_AT_ONCE)]
            return digest_of_pieces(piece_digests(file.read(size)) for size in sizes)


class ChunkPipeline:
    """Writes a file in chunks: while a thread writes one chunk, the next is gathered and hashed."""

    def __init__(self, output: Output, thread: ThreadPoolExecutor) -> None:
        self.output, self.writers, self._thread = output, output.writers, thread
        self._last_write: Future[None] | None = None
        self._buffers = [empty(0), empty(0)]

    def send(self, source: Contribution) -> list[tuple[str, bytes]]:
        """Write the slices of all ranks to the file. Return the digests of this rank's pieces."""
        digests: list[tuple[str, bytes]] = []
        group, share = self.writers.group, share_of(source.partition, self.writers.ranks)
        first = source.partition.bounds[self.writers.comm.rank]
        for chunk in share.cut(self._length(source)):
            overlap = chunk.of_slice(share, group.rank)
            values, start = source.on_host(overlap), first + overlap.start
            if source.by_pieces:
                digests += [(name, piece_digests(run)) for name, _, run in source.runs(start, values)]
            if group.size == 1:
                self._write(source.runs(start, values))
                continue
            buffer = self._buffer(source)[: chunk.stop - chunk.start] if self.writers.writes else None
            group.gather(values, buffer, chunk, label=f"checkpoint {source.prefix}{source.unit.name}")
            if buffer is not None:
                places = share.segments(chunk)
                self._write(run for place, part in places for run in source.runs(place, buffer[part]))
        return digests

    def _length(self, source: Contribution) -> int:
        """Return a chunk's length: half a unit, rounded up to full pieces, but at most CHUNK_ELEMENTS."""
        quantum = PIECE_BYTES // int(source.values.itemsize)
        return min(CHUNK_ELEMENTS, -(-source.unit.length // 2 // quantum) * quantum) or quantum

    def _buffer(self, source: Contribution) -> Array:
        """Return the chunk buffer that the write in progress does not use."""
        self._buffers.reverse()
        if self._buffers[0].size < self._length(source) or self._buffers[0].dtype != source.values.dtype:
            self._buffers[0] = empty(self._length(source), source.values.dtype)
        return self._buffers[0]

    def _write(self, runs: Iterable[Run]) -> None:
        self.finish()
        self._last_write = self._thread.submit(self.output.write, list(runs))

    def finish(self) -> None:
        if self._last_write is not None:
            self._last_write.result()


def write_together(
    writers: Writers, contents: Sequence[Content], stamp: Stamp, *, tick: Callable[[str], None]
) -> Sequence[Mapping[str, Any]]:
    """Write and sync all files. Return their keys, valid on rank 0. Collective.

    Raises JobError on all ranks if a file cannot be written. Calls `tick` often, with the current work.
    """
    comm = writers.comm
    blank = [dict.fromkeys([name for name, *_ in content.tensors], BLANK) for content in contents]
    keys = stamp(*blank)
    outputs = [Output(writers, *pair) for pair in zip(contents, keys, strict=True)]
    agree(comm, outputs)
    for output in outputs if writers.writes and comm.rank != 0 else ():
        output.attempt(output.open)
    with ThreadPoolExecutor(1, "zero_mpi checkpoint") as thread:
        digests = [write_tensors(output, thread, tick) for output in outputs]
    if comm.rank == 0:
        keys = stamp(*digests)
        for output, final in zip(outputs, keys, strict=True):
            output.stamp(final)
    agree(comm, outputs)  # a rank may sync for its host only after the host's last write
    for output in outputs:
        tick(f"flushing {output.content.path.name} to disk")
        output.close(durable=True)
    agree(comm, outputs)
    return keys


def agree(comm: Comm, outputs: Iterable[Output]) -> None:
    """Raise JobError on all ranks if any rank had a problem. Close open files first. Collective."""
    problems = [output.problem for output in outputs if output.problem is not None]
    try:
        agree_on(comm, explain(problems[0]) if problems else None)
    except JobError:
        for output in outputs:
            output.close(durable=False)
        raise


def agree_on(comm: Comm, problem: str | None) -> None:
    """If any rank has a problem, raise JobError on all ranks with the first such rank's. Collective."""
    for rank, text in enumerate(comm.allgather_object(problem)):
        if text:
            raise JobError(f"rank {rank}: {text}" if rank else text)


def write_tensors(output: Output, thread: ThreadPoolExecutor, tick: Callable[[str], None]) -> Digests:
    """Write all tensors of a file. Return their digests on rank 0. Collective."""
    chunks, content = ChunkPipeline(output, thread), output.content
    pieces = defaultdict[str, list[bytes]](list)  # digests of each tensor's pieces, ordered by unit and rank
    for contribution in content.contributions:
        assert contribution.by_pieces or not any(output.writers.writer_of), "row shards: expected one writer"
        tick(f"writing {contribution.prefix}{contribution.unit.name} to {content.path.name}")
        for name, part in chain.from_iterable(output.comm.gather_object(chunks.send(contribution)) or ()):
            pieces[name].append(part)
    chunks.finish()
    if output.comm.rank != 0:
        return {}
    digests = {name: digest_of_pieces(parts) for name, parts in pieces.items()}
    for name, constant in content.constants.items():
        output.write([(name, 0, constant)])
        digests[name] = digest(constant)
    table = checked_table(content.tensors)
    rest = [name for name in table if name not in digests]  # row shards end inside pieces: read the file
    output.attempt(lambda: digests.update((name, output.read_digest(table[name])) for name in rest))
    return {name: digests.get(name, BLANK) for name in table}
