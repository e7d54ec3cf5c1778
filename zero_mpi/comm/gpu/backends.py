"""The backends, which send chunks of device memory between ranks.

*CUDA-aware MPI* reads and writes device memory itself. Exact mode needs only point-to-point messages, which
every such library supports; some libraries crash in nonblocking reductions of device memory. MPI
has no streams: an exchange's buffers receive data only after the sums that read them are done, and the
library's own reductions (`fast`) block.

*Staged* sends through host memory. This works with every MPI library, and for several ranks on one GPU. The
chunks of an exchange are copied into pinned memory, sent, received into pinned memory and copied back.
Exchanges overlap: while MPI sends one, the next is copied to the host and the previous one back to the GPU. A
chunk for several ranks is copied to the host once. The pinned memory is divided once and reused. Sums are
always in rank order.

*NCCL*, on request: one stream orders all work, and the host does not wait. In exact mode NCCL moves data by
groups of sends and receives. With `fast`, NCCL adds in its own order; slices of unequal lengths need one
reduction per owner, in a group. Ranks connect through MPI, which also transfers all data outside GPUs.
"""

from collections.abc import Iterator
from typing import Any

from zero_mpi.comm.agree import run_on_all
from zero_mpi.comm.base import Comm
from zero_mpi.comm.gpu.exchanges import MPI, Exchange, GpuStreams, arrival, as_message, completion, overlap
from zero_mpi.comm.kinds import (
    AWARE_CHUNK,
    AWARE_DEPTH,
    GPU_MPI,
    NCCL,
    NCCL_CHUNK,
    NCCL_DEPTH,
    STAGED,
    STAGED_ALIGNED,
    STAGED_DEPTH,
    Transport,
    staged_chunk,
)
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.transfer import Running, loan
from zero_mpi.device import Marker
from zero_mpi.device.arrays import address
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError


class Backend:
    """Base class of backends. By default they send MPI messages over a duplicate of the world communicator.

    depth       maximum number of exchanges in progress; a buffer is reused `depth` exchanges later
    in_order    whether all work is launched immediately; then the side stream orders it, not the host
    kind        transport that uses this backend
    """

    depth: int
    in_order = False
    kind: Transport

    def __init__(self, streams: GpuStreams) -> None:
        self.streams = streams
        self._comm: Any = MPI.COMM_WORLD.Dup()

    def largest(self, itemsize: int, *, summed: bool) -> int:
        """Return the maximum number of elements in a chunk; `summed`: whether chunks are added."""
        raise NotImplementedError

    def run(self, exchanges: Iterator[Exchange], tags: Iterator[int]) -> Running:
        """Transfer the chunks of all exchanges and launch their `then`; each exchange uses one tag."""
        raise NotImplementedError

    def sum_slices(self, full: Array, target: Array, partition: Partition) -> None:
        """Set `target` to this rank's slice of the sum of `full` over ranks, by the library. Collective."""
        raise NotImplementedError  # not called if the library cannot add

    def sum_all(self, array: Array) -> None:
        """Replace `array` on all ranks by its sum over ranks, by the library. Collective."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the backend's resources. Collective."""
        self._comm.Free()


class CudaAwareBackend(Backend):
    """Backend that passes device memory to MPI."""

    depth, kind = AWARE_DEPTH, GPU_MPI
    most_bytes = 1 << 30  # maximum bytes of a message, because counts are C ints in older interfaces
    most_summed = AWARE_CHUNK  # maximum elements of a chunk that is added

    def largest(self, itemsize: int, *, summed: bool) -> int:
        elements = max(1, self.most_bytes // itemsize)
        return min(elements, self.most_summed) if summed else elements

    def run(self, exchanges: Iterator[Exchange], tags: Iterator[int]) -> Running:
        marks: dict[int, Any] = {}  # number of a buffer -> event after the sum that reads it
        steps = (
            self._one(exchange, next(tags), number % self.depth, marks)
            for number, exchange in enumerate(exchanges)
        )
        yield from overlap(steps, self.depth)
        for mark in marks.values():  # the next reduction reuses the buffers
            yield completion(mark)

    def _one(self, exchange: Exchange, tag: int, slot: int, marks: dict[int, Any]) -> Running:
        if slot in marks:
            yield completion(marks.pop(slot))
        self.streams.adopt()
        requests = [self._comm.Irecv(as_message(buffer), source, tag) for buffer, source in exchange.receives]
        for chunk, targets in exchange.sends:
            requests += [self._comm.Isend(as_message(chunk), target, tag) for target in targets]
        yield arrival(self.streams.adopt, requests)
        if exchange.then is not None:
            exchange.then()
            marks[slot] = self.streams.mark()

    def sum_slices(self, full: Array, target: Array, partition: Partition) -> None:
        self.streams.adopt()
        for chunk in partition.cut(self.largest(full.itemsize, summed=False)):
            send = [full[chunk.start : chunk.stop], MPI.FLOAT]
            receive = [target[chunk.of_slice(partition, self._comm.Get_rank())], MPI.FLOAT]
            self._comm.Reduce_scatter(send, receive, chunk.counts, MPI.SUM)

    def sum_all(self, array: Array) -> None:
        self.streams.adopt()
        step = self.largest(array.itemsize, summed=False)
        for start in range(0, array.size, step):
            self._comm.Allreduce(MPI.IN_PLACE, [array[start : start + step], MPI.FLOAT], MPI.SUM)


class PinnedBuffers:
    """Pinned memory of an exchange, which is free when its last copy to the GPU is complete."""

    def __init__(self, streams: GpuStreams, nbytes: int) -> None:
        self.down, self.up = (streams.gpu.pinned(nbytes) for _ in range(2))
        self.free: Any = Marker()


class StagedBackend(Backend):
    """Backend that copies chunks to pinned host memory and sends them from there."""

    depth, kind = STAGED_DEPTH, STAGED

    def __init__(self, streams: GpuStreams) -> None:
        super().__init__(streams)
        self._others: int = max(1, self._comm.Get_size() - 1)
        self.chunk_bytes = staged_chunk(self._others)
        self._rings: list[list[PinnedBuffers]] = []

    @property
    def about(self) -> str:
        nbytes = self.chunk_bytes * self._others * 2 * self.depth
        return f"{nbytes / 2**20:.0f} MiB of pinned memory per transfer"

    def largest(self, itemsize: int, *, summed: bool) -> int:
        elements = max(1, self.chunk_bytes // itemsize)
        return elements - elements % STAGED_ALIGNED if elements > STAGED_ALIGNED else elements

    def run(self, exchanges: Iterator[Exchange], tags: Iterator[int]) -> Running:
        def new() -> list[PinnedBuffers]:
            return [PinnedBuffers(self.streams, self.chunk_bytes * self._others) for _ in range(self.depth)]

        with loan(self._rings, new) as ring:
            steps = (
                self._one(exchange, next(tags), ring[number % self.depth])
                for number, exchange in enumerate(exchanges)
            )
            yield from overlap(steps, self.depth)

    def _one(self, exchange: Exchange, tag: int, stage: PinnedBuffers) -> Running:
        yield completion(stage.free)
        sends = []  # (chunk to send, in pinned memory; rank that receives it)
        buffers = cut(stage.down, [chunk for chunk, _ in exchange.sends])
        for (chunk, targets), pinned in zip(exchange.sends, buffers, strict=True):
            self.streams.fetch(pinned, chunk)
            sends += [(pinned, target) for target in targets]
        fetched = self.streams.fetched()
        buffers = cut(stage.up, [buffer for buffer, _ in exchange.receives])
        receives = list(zip(exchange.receives, buffers, strict=True))
        requests = [self._comm.Irecv(as_message(pinned), source, tag) for (_, source), pinned in receives]
        yield completion(fetched)
        requests += [self._comm.Isend(as_message(pinned), target, tag) for pinned, target in sends]
        yield arrival(self.streams.adopt, requests)
        for (buffer, _), pinned in receives:
            self.streams.bring(buffer, pinned)
        stage.free = self.streams.mark()
        if exchange.then is not None:
            exchange.then()


def cut(memory: Array, chunks: list[Array]) -> Iterator[Array]:
    """Yield consecutive parts of memory as buffers, one per chunk."""
    start = 0
    for chunk in chunks:
        assert start + chunk.nbytes <= memory.nbytes, "a chunk is longer than `largest`"
        yield memory[start : start + chunk.nbytes]
        start += chunk.nbytes


def load_nccl() -> Any:
    """Return CuPy's binding of NCCL. Raise UsageError if NCCL is not installed."""
    from cupy.cuda import nccl

    if not nccl.available:
        raise UsageError(
            "--transport nccl: CuPy finds no NCCL; pip install nvidia-nccl-cu12 (or -cu13), load your site's "
            "module, or use --transport auto"
        )
    return nccl


class NcclBackend(Backend):
    """Backend that uses NCCL on the ranks of `host`, a host transport.

    Collective; raises UsageError on all ranks if NCCL does not start.
    """

    in_order, kind, depth = True, NCCL, NCCL_DEPTH
    most_summed = NCCL_CHUNK  # maximum elements of a chunk that is added

    def __init__(self, streams: GpuStreams, host: Comm) -> None:
        self.streams = streams
        self._nccl = run_on_all(host, load_nccl)
        name = host.broadcast_object(self._nccl.get_unique_id() if host.rank == 0 else None)
        streams.adopt()
        self._comm = run_on_all(host, lambda: self._join(name, host))

    def _join(self, name: Any, host: Comm) -> Any:
        """Return NCCL's communicator. All ranks call this together; NCCL fails on all ranks or on none."""
        try:
            return self._nccl.NcclCommunicator(host.size, name, host.rank)
        except RuntimeError as error:
            raise UsageError(
                f"--transport nccl: NCCL does not start ({error}); it needs one GPU per rank; set "
                "NCCL_DEBUG=INFO for details, or use --transport auto"
            ) from error

    @property
    def version(self) -> str:
        number = self._nccl.get_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def largest(self, itemsize: int, *, summed: bool) -> int:
        return self.most_summed if summed else 1 << 62  # counts are size_t

    def run(self, exchanges: Iterator[Exchange], tags: Iterator[int]) -> Running:
        """Launch all exchanges without waiting; the stream keeps their order, the same on all ranks."""
        for exchange in exchanges:
            next(tags)
            if exchange.sends or exchange.receives:
                nccl, stream = self._nccl, self.streams.stream.ptr
                nccl.groupStart()
                for chunk, targets in exchange.sends:
                    for target in targets:
                        self._comm.send(address(chunk), chunk.nbytes, nccl.NCCL_UINT8, target, stream)
                for buffer, source in exchange.receives:
                    self._comm.recv(address(buffer), buffer.nbytes, nccl.NCCL_UINT8, source, stream)
                nccl.groupEnd()
            if exchange.then is not None:
                exchange.then()
        yield from ()

    def sum_slices(self, full: Array, target: Array, partition: Partition) -> None:
        nccl, stream = self._nccl, self.streams.stream.ptr
        kind, add = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
        if len(set(partition.counts)) == 1:
            self._comm.reduceScatter(address(full), address(target), target.size, kind, add, stream)
            return
        nccl.groupStart()
        for owner, length in enumerate(partition.counts):
            if length:
                source = address(full[partition.part(owner)])
                self._comm.reduce(source, address(target), length, kind, add, owner, stream)
        nccl.groupEnd()

    def sum_all(self, array: Array) -> None:
        nccl, stream = self._nccl, self.streams.stream.ptr
        pointer = address(array)
        self._comm.allReduce(pointer, pointer, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

    def close(self) -> None:
        self._comm.destroy()
