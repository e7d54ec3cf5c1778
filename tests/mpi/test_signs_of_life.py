"""Ranks that wait for rank 0 hear that it gets on, and end with it where it fails or is told to stop."""

import pytest

from zero_mpi.launch import world as world_module
from zero_mpi.launch.world import StopAwareComm, World


@pytest.fixture
def heard(monkeypatch):
    times, broadcast = [], StopAwareComm.broadcast_object

    def noted(self, value, root=0):
        found = broadcast(self, value, root)
        times.append(self.meter.changed)
        return found

    monkeypatch.setattr(StopAwareComm, "broadcast_object", noted)
    monkeypatch.setattr(world_module, "BEAT", 0.0)
    return times


@pytest.fixture
def world(mpi):
    return World(mpi.rank, mpi.size, comm=StopAwareComm(mpi))


def work(beat, after=lambda: "done"):
    for _ in range(3):
        beat()
    return after()


def test_each_beat_is_progress_of_all_ranks(heard, world):
    assert world.run_on_root_with_beat(work) == "done"
    assert len(set(heard)) == 5, "three beats, the end and the answer"
