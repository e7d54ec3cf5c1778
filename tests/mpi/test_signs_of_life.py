"""Ranks that wait for rank 0 receive its heartbeats, which count as progress."""

from zero_mpi.launch import world as world_module
from zero_mpi.launch.world import StopAwareComm, World


def work(beat):
    for _ in range(3):
        beat()
    return "done"


def test_each_beat_is_progress_of_all_ranks(mpi, monkeypatch):
    times, broadcast = [], StopAwareComm.broadcast_object

    def noted(self, value, root=0):
        result = broadcast(self, value, root)
        times.append(self.meter.changed)
        return result

    monkeypatch.setattr(StopAwareComm, "broadcast_object", noted)
    monkeypatch.setattr(world_module, "BEAT", 0.0)
    assert World(mpi.rank, mpi.size, comm=StopAwareComm(mpi)).run_on_root_with_beat(work) == "done"
    assert len(set(times)) == 5, "expected progress by three heartbeats, their end and the result"
