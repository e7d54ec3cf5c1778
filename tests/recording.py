"""A communicator that writes down what is asked of it: which collective, of what, how many bytes it moves."""

from typing import NamedTuple

from zero_mpi import Comm
from zero_mpi.comm import Handle


class Event(NamedTuple):
    """A collective, or the wait for one. `sent`: bytes that this rank sends to others."""

    kind: str
    label: str
    sent: int = 0


class Waited(Handle):
    """Writes down when the runtime waits."""

    def __init__(self, handle, log, label):
        self.handle, self.log, self.label = handle, log, label

    def wait(self):
        self.log.append(Event("wait", self.label))
        self.handle.wait()

    def test(self):
        return self.handle.test()


class RecordingComm(Comm):
    """Passes everything on to another communicator."""

    def __init__(self, inner):
        self.inner, self.log = inner, []
        self.rank, self.size, self.exact = inner.rank, inner.size, inner.exact

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

    def gather(self, part, room, piece, root=0, label=""):
        self.log.append(Event("gather", label, 0 if self.rank == root else part.nbytes))
        self.inner.gather(part, room, piece, root, label)

    def gather_object(self, value, root=0):
        return self.inner.gather_object(value, root)

    def background(self):
        other = RecordingComm(self.inner.background())
        other.log = self.log
        return other

    def create_file(self, path):
        return self.inner.create_file(path)

    def broadcast_object(self, value, root=0):
        return self.inner.broadcast_object(value, root)

    def allgather_object(self, value):
        return self.inner.allgather_object(value)

    def barrier(self):
        self.inner.barrier()

    def progress(self):
        self.inner.progress()

    def memory(self, wholes, buffers):
        return self.inner.memory(wholes, buffers)

    def publish(self):
        self.inner.publish()

    def await_published(self):
        self.inner.await_published()

    def await_readers(self):
        self.inner.await_readers()

    def close(self):
        self.inner.close()
