"""The doctor measures rings, shared memory and shared folders among real ranks."""

from argparse import Namespace
from pathlib import Path

import pytest

from zero_mpi.comm.topology import PRETEND
from zero_mpi.commands.doctor import hosts, measures
from zero_mpi.commands.doctor.ranks import BAD, NOTE, OK, find_ranks
from zero_mpi.launch.world import find_world


def found_with(monkeypatch, ranks_per_node, **options):
    monkeypatch.setenv(PRETEND, str(ranks_per_node))
    return find_ranks(find_world(), Namespace(**options))


def test_ranks_and_hosts(monkeypatch, mpi):
    job = found_with(monkeypatch, 2)
    assert job.nodes == tuple(tuple(range(n, min(n + 2, mpi.size))) for n in range(0, mpi.size, 2))
    assert (job.node, job.place) == divmod(mpi.rank, 2)
    assert len(set(job.names)) == len(job.nodes)
    assert job.of_nodes(lambda: mpi.rank) == [ranks[0] for ranks in job.nodes]


@pytest.mark.world(2, 3, 4)
def test_links_inside_and_between(monkeypatch, mpi):
    job = found_with(monkeypatch, 2, quick=True)
    labels = [row.what for row in measures.links(job)]
    assert labels == ["link in a node", "network"][: 1 + (mpi.size > 2)]
    link = job.figures["links"]
    assert (link["between"] is None) == (mpi.size == 2)
    assert all(figure["alpha_seconds"] > 0 for figure in filter(None, link.values()))
    rings = job.gather(measures.across(job))
    assert all(not ring or (r in ring and rings[ring[0]][0] == ring) for r, (ring, _) in enumerate(rings))
    assert sum(bool(ring) for ring, _ in rings) == rings[0][1] * len(job.nodes)


def test_a_shared_window_works(monkeypatch, mpi):
    job = found_with(monkeypatch, 2)
    assert hosts.try_window(job) == ""


@pytest.mark.world(2, 3, 4)
def test_no_room_for_a_window_is_told_by_all_ranks_of_the_host(monkeypatch, mpi):
    from zero_mpi.comm.shared import memory as window

    job = found_with(monkeypatch, 2)
    if job.node == 0:
        monkeypatch.setattr(window, "space_problem", lambda nbytes: "there is none")
    entry = {row.what: row for row in hosts.shared_memory(job)}["shared window"]
    assert (entry.verdict, entry.value.startswith(f"{job.names[0]}: there is none")) == (NOTE, True)


@pytest.mark.world(2, 4)
def test_a_folder_that_other_hosts_do_not_see_is_bad(monkeypatch, mpi, ranks_folder):
    job = found_with(monkeypatch, 1, out=str(ranks_folder / "run"))
    assert measures.run_folder(job)[-1].verdict == OK
    mpi.barrier()
    assert list(ranks_folder.iterdir()) == []
    mpi.barrier()
    disk = ranks_folder / f"disk-{mpi.rank == mpi.size - 1}"  # the last rank has a separate disk
    disk.mkdir(exist_ok=True)
    monkeypatch.chdir(disk)
    monkeypatch.setattr(measures, "PATIENCE", 0.2)
    job.options.out = str(Path("run"))
    row = measures.run_folder(job)[-1]
    assert (row.verdict, job.names[-1] in row.value) == (BAD, True)
