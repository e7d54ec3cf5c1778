"""Only slow ranks are named, with their hosts; the hosts' energy counters are read."""

import json
import logging
from pathlib import Path

import pytest
from jobs import run_job, status_of
from test_command_bits import SIZES, needs_mpiexec, write_text

from zero_mpi.telemetry import energy
from zero_mpi.telemetry.energy import Energy
from zero_mpi.train.observers import SlowRanks

HOSTS = ["a", "a", "b", "b"]
EVEN, BEHIND = [1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 1.5, 1.0]


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "zero_mpi")
    return caplog


def test_a_rank_is_named_the_third_time_in_a_row_and_once(said):
    slow = SlowRanks(HOSTS)
    texts = [slow.add(seconds) for seconds in (BEHIND, BEHIND, BEHIND, BEHIND, EVEN)]
    assert texts == ["", "", "rank 2 on b, 50% behind", "rank 2 on b, 50% behind", ""]
    warned, recovered = said.records
    assert warned.levelname == "WARNING"
    assert warned.getMessage().startswith(
        "rank 2 on b is slow: 1.5 s per micro-batch, 50 % more than the median"
    )
    assert warned.facts == {"rank": 2, "host": "b", "behind": 0.5}
    assert recovered.getMessage() == "rank 2 on b is no longer slow"


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        ([1.0, 2.0], "rank 1 on a, 100% behind"),
        ([3.0, 1.0], "rank 0 on a, 200% behind"),
        ([1.0, 1.0, None, 2.0], "rank 3 on b, 100% behind"),
        ([1.0, 1.0, 1.3, 1.4], "rank 2 on b, 30% behind; rank 3 on b, 40% behind"),
        ([1.0], ""),
        ([None, None], ""),
        ([0.0, 0.0], ""),
    ],
)
def test_the_median_is_of_those_who_computed_and_of_two_the_faster(seconds, named):
    slow = SlowRanks(HOSTS)
    assert [slow.add(seconds) for _ in range(3)][-1] == named


SLOWED = """
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.train import command
from zero_mpi.train.observers import StepTimer

stop = StepTimer.__exit__

def slow(self, *error):
    stop(self, *error)
    self._seconds += 1000 * (1 + MPI.COMM_WORLD.rank)  # large, so that real times do not matter

StepTimer.__exit__ = slow
command.main()
"""


@needs_mpiexec
def test_a_slow_rank_is_named_in_the_log_the_events_and_the_status(tmp_path):
    script, out = tmp_path / "slowed.py", tmp_path / "out"
    script.write_text(SLOWED)
    flags = ["--batch-size", "6", "--micro-batch", "2", "--context", "16", "--sample", "0", "--steps", "4"]
    flags += ["--log-every", "1", "--data", *write_text(tmp_path), "--out", str(out)]
    status, printed, errors = run_job(2, [str(script), *SIZES, *flags], cwd=tmp_path)
    assert (status, errors) == (0, "")
    assert printed.count(" is slow: ") == 1
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (warned,) = [event for event in events if event["event"] == "warning"]
    assert (warned["rank"], warned["step"]) == (1, 3)
    assert warned["text"].startswith(f"rank 1 on {warned['host']} is slow")
    assert 0.9 < warned["behind"] < 1.1
    entry = status_of(out)
    assert entry["slow"].startswith(f"rank 1 on {warned['host']}, ")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        first, second = record["micro_batch_seconds"]
        assert 1000 < first < 1100 < 2000 < second < 2100
        assert len(record["waited_seconds"]) == 2
        assert min(record["waited_seconds"]) > 0


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setattr(energy, "CRAY", tmp_path / "energy")

    def write(zone, **files):
        (tmp_path / zone).mkdir(exist_ok=True)
        for file, text in files.items():
            Path(tmp_path, zone, file).write_text(f"{text}\n")

    return write


def test_sockets_and_their_memory_are_added_and_counters_go_round(host):
    host("intel-rapl:0", name="package-0", energy_uj=900, max_energy_range_uj=1000)
    host("intel-rapl:0:0", name="core", energy_uj=5, max_energy_range_uj=1000)
    host("intel-rapl:0:1", name="dram", energy_uj=0, max_energy_range_uj=1000)
    host("intel-rapl:1", name="psys", energy_uj=0, max_energy_range_uj=1000)
    measured = Energy()
    host("intel-rapl:0", energy_uj=950)
    measured.count()
    host("intel-rapl:0", energy_uj=20)
    host("intel-rapl:0:0", energy_uj=500)
    host("intel-rapl:0:1", energy_uj=7)
    host("intel-rapl:1", energy_uj=500)
    measured.count()
    assert measured.take() == pytest.approx((50 + 70 + 7) * 1e-6)
    assert measured.take() == 0.0


def test_a_cray_tells_of_the_whole_node(host, tmp_path):
    host("intel-rapl:0", name="package-0", energy_uj=0, max_energy_range_uj=1000)
    (tmp_path / "energy").write_text("1000 J 1700000000 us\n")
    measured = Energy()
    (tmp_path / "energy").write_text("1250 J 1700000009 us\n")
    measured.count()
    assert measured.take() == 250.0
    (tmp_path / "energy").unlink()
    measured.count()
    assert measured.take() is None, "the counter was removed, so the energy is unknown"
