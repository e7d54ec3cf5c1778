"""What the doctor measures among real ranks: times of the slowest, clocks, memory, folders that hosts see."""

import time
from pathlib import Path

import pytest

from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.topology import PRETEND
from zero_mpi.doctor import clocks, links, output_folder, shared_memory
from zero_mpi.doctor.ranks import find_ranks
from zero_mpi.doctor.verdicts import BAD, NOTE, OK
from zero_mpi.launch.world import find_world


def found_with(monkeypatch, ranks_per_node):
    """The ranks, of which so many count as a host."""
    monkeypatch.setenv(PRETEND, str(ranks_per_node))
    return find_ranks(find_world())


def test_ranks_and_hosts(monkeypatch, mpi):
    where = found_with(monkeypatch, 2)
    assert where.nodes == tuple(tuple(range(n, min(n + 2, mpi.size))) for n in range(0, mpi.size, 2))
    assert (where.node, where.place) == divmod(mpi.rank, 2)
    assert len(set(where.names)) == len(where.nodes)
    assert where.of_nodes(lambda: mpi.rank) == [ranks[0] for ranks in where.nodes]


def test_a_time_is_that_of_the_slowest_rank(monkeypatch, mpi):
    where = found_with(monkeypatch, mpi.size)
    seconds = links.seconds_of(where, lambda: time.sleep(0.02 if mpi.rank == mpi.size - 1 else 0), budget=0.1)
    assert 0.02 <= seconds < 0.2
    nobody = links.seconds_of(where, None if mpi.rank else lambda: time.sleep(0.01), budget=0.03)
    assert nobody >= 0.01


@pytest.mark.world(2, 3, 4)
def test_links_inside_and_between(monkeypatch, mpi):
    where = found_with(monkeypatch, 2)
    figures = {}
    told = list(links.section(where, links.Effort(1 << 15, 32, 0.01), figures))
    assert [row.verdict for row in told if row.what != "network"] == [OK] * (len(told) - (mpi.size > 2))
    link = figures["links"]
    assert link["node"]["transport"] == "shared"
    assert (link["between"] is None) == (mpi.size == 2)
    for place in filter(None, link.values()):
        assert place["alpha_seconds"] + place["beta_seconds_per_byte"] > 0
        for way in place["ways"].values():
            assert [entry["bytes"] for entry in way["all_gather"]["sizes"]] == [1 << 10, 1 << 15]


def test_over_shared_memory_a_reduction_is_one_of_shared_memory(monkeypatch, mpi):
    """And not one over messages, as for a buffer that is of no pool."""
    where = found_with(monkeypatch, mpi.size)
    if mpi.size == 1:
        return
    way = next(links.inside(where))
    operations = links.prepare(way, 1 << 10)
    monkeypatch.setattr(MPIComm, "reduce_scatter", lambda *arguments, **named: pytest.fail("messages"))
    operations[links.REDUCE]()
    operations[links.GATHER]()


def test_a_shared_window_works(monkeypatch, mpi):
    where = found_with(monkeypatch, 2)
    assert shared_memory.try_window(where) == ""


@pytest.mark.world(2, 3, 4)
def test_no_room_for_a_window_is_told_by_all_ranks_of_the_host(monkeypatch, mpi):
    from zero_mpi.comm.shared import window

    where = found_with(monkeypatch, 2)
    if where.node == 0:
        monkeypatch.setattr(window, "room_problem", lambda nbytes: "there is none")
    told = {row.what: row for row in shared_memory.section(where)}
    assert told["shared window"].verdict == NOTE
    assert told["shared window"].value == f"{where.names[0]}: there is none: a run would go over messages"


@pytest.mark.world(2, 3, 4)
def test_a_clock_that_is_off_is_found(monkeypatch, mpi):
    where = found_with(monkeypatch, 1)
    last = mpi.size - 1
    if mpi.rank == last:
        monkeypatch.setattr(clocks, "now", lambda: time.time() - 5)
    offsets = clocks.offsets(where)
    assert [round(ahead) for ahead, _ in offsets] == [0] * (last - 1) + [-5]
    assert all(0 <= wrong < 0.5 for _, wrong in offsets)
    (row,) = clocks.rows(clocks.offsets(where), where.names[1:])
    assert (row.verdict, where.names[last] in row.value) == (NOTE, True)


@pytest.mark.world(2, 4)
def test_a_folder_that_other_hosts_do_not_see_is_bad(monkeypatch, mpi, ranks_folder):
    where = found_with(monkeypatch, 1)
    told = output_folder.section(where, ranks_folder / "run")
    assert told[-1].verdict == OK
    mpi.barrier()
    assert list(ranks_folder.iterdir()) == []
    mpi.barrier()
    mine = ranks_folder / f"disk-{mpi.rank == mpi.size - 1}"  # the last rank has a disk of its own
    mine.mkdir(exist_ok=True)
    monkeypatch.chdir(mine)
    monkeypatch.setattr(output_folder, "PATIENCE", 0.2)
    told = output_folder.section(where, Path("run"))
    assert (told[-1].verdict, told[-1].value) == (
        BAD,
        f"not on {where.names[-1]}: what rank 0 writes to run",
    )
