"""Ranks that wait for rank 0 hear that it gets on, and end with it where it fails or is told to stop."""

import signal

import pytest

from zero_mpi.errors import UsageError
from zero_mpi.launch import world as world_module
from zero_mpi.launch.stopping import PREPARING, Stopped, signals
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


def refuse():
    raise UsageError("no such text")


def test_all_ranks_raise_what_rank_0_raises(heard, world):
    with pytest.raises(UsageError, match="no such text"):
        world.run_on_root_with_beat(lambda beat: work(beat, refuse))
    assert len(heard) == 4


def test_a_signal_ends_the_work_and_no_beat(heard, world, monkeypatch):
    monkeypatch.setattr(signals, "phase", PREPARING)
    monkeypatch.setattr(signals, "caught", "")

    def told(beat):
        beat()
        signals._note(signal.SIGUSR1, None)
        raise AssertionError("the work goes on")

    with pytest.raises(Stopped):
        world.run_on_root_with_beat(told)
    assert len(heard) == 2, "a beat and the end"
