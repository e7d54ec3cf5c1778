"""Test of the doctor on two hosts: it reports their names and the link between them."""

import json

import pytest
from hosts import Hosts, hosts, installed, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

WIRE = 125e6  # bytes a second of 1 Gbit/s


def examine(cluster: Hosts, ranks: int, per_host: int, *flags: str):
    try:
        installed("mpich")
    except LookupError as error:
        pytest.skip(str(error))
    figures = cluster.folder / "figures.json"
    job = ["-m", "zero_mpi", "doctor", "--json", str(figures), *flags]
    status, output, errors = cluster.run(ranks, per_host, job, timeout=100)
    assert (status in (0, 1), errors) == (True, ""), output + errors
    report = json.loads(figures.read_text())
    return status, {row["what"]: row for row in report["rows"]}, report


@pytest.fixture(scope="module")
def slow_hosts():
    with hosts(2, "1gbit") as cluster:
        yield cluster


@pytest.mark.timeout_seconds(120)
def test_hosts_and_the_link_between_them(slow_hosts):
    status, rows, report = examine(slow_hosts, 4, 2)
    assert status == 0, rows
    assert report["hosts"] == [{"name": "h1", "ranks": [0, 1]}, {"name": "h2", "ranks": [2, 3]}]
    assert rows["host h1"]["value"].startswith("ranks 0-1 on ")
    assert rows["seen by all hosts"]["verdict"] == "ok"
    assert 0 < report["links"]["node"]["alpha_seconds"] < 0.5
    between = report["links"]["between"]
    assert 0.5 / WIRE < between["beta_seconds_per_byte"] < 10 / WIRE
