"""Communicator that records its collectives with their labels and the bytes that this rank sends."""

from typing import NamedTuple

from zero_mpi.comm import Handle
from zero_mpi.comm.wrapper import CommWrapper


class Event(NamedTuple):
    """Collective, or the wait for its end. `sent`: bytes that this rank sends to other ranks."""

    kind: str
    label: str
    sent: int = 0


class Waited(Handle):
    def __init__(self, handle, log, label):
        self.handle, self.log, self.label = handle, log, label

    def wait(self):
        self.log.append(Event("wait", self.label))
        self.handle.wait()

    def test(self):
        return self.handle.test()


class RecordingComm(CommWrapper):
    def __init__(self, inner):
        super().__init__(inner)
        self.inner, self.log = inner, []

    def _start(self, kind, label, sent, handle):
        self.log.append(Event(kind, label, sent))
        return Waited(handle, self.log, label)

    def allgather(self, shard, full, partition, label=""):
        sent = partition.counts[self.rank] * full.itemsize * (self.size - 1)
        return self._start("allgather", label, sent, self.inner.allgather(shard, full, partition, label))

    def reduce_scatter(self, full, out, partition, *, contributors=None, accumulate=False, label=""):
        gives = self.rank < (self.size if contributors is None else contributors)
        sent = (partition.length - partition.counts[self.rank]) * full.itemsize if gives else 0
        handle = self.inner.reduce_scatter(
            full, out, partition, contributors=contributors, accumulate=accumulate, label=label
        )
        return self._start("reduce_scatter", label, sent, handle)

    def allreduce(self, array, label=""):
        gives = array.nbytes if self.size > 1 else 0
        return self._start("allreduce", label, gives, self.inner.allreduce(array, label))

    def broadcast(self, array, root=0, label=""):
        return self._start("broadcast", label, 0, self.inner.broadcast(array, root, label))

    def gather(self, part, buffer, piece, root=0, label=""):
        self.log.append(Event("gather", label, 0 if self.rank == root else part.nbytes))
        self.inner.gather(part, buffer, piece, root, label)

    def background(self):
        other = RecordingComm(self.inner.background())
        other.log = self.log
        return other
