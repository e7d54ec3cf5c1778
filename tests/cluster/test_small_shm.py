"""If one of two hosts has too little shared memory, a line names the host and no rank keeps waiting."""

import re

import pytest
from hosts import why_no_hosts
from test_command_bits import write_text

pytestmark = [
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
    pytest.mark.timeout_seconds(120),
]
LINE = (
    r"zero_mpi( train)?: error: MPI needs 4\.3 MiB of shared memory for 4 ranks on (\S+), .*/dev/shm has "
    r".*3\.0 MiB free: .*--shm-size=1g.*\n"
)


@pytest.fixture(params=["h1", "h2"])
def small(request, four_hosts):
    inside(four_hosts, request.param, "mount", "-t", "tmpfs", "-o", "size=3m", "none", "/dev/shm")
    yield request.param
    inside(four_hosts, request.param, "umount", "/dev/shm")


def inside(hosts, host: str, *command: str) -> None:
    status, _, errors = hosts.inside(host, *command)
    assert status == 0, errors


def test_the_host_without_room_is_named_and_all_ranks_end(small, four_hosts, common_path):
    flags = ["--data", *write_text(common_path), "--out", str(common_path / "out"), "--steps", "1"]
    status, _, errors = four_hosts.run(8, 4, ["-m", "zero_mpi.train", *flags], timeout=60)
    match = re.search(LINE, errors)
    assert match, errors
    assert (match[2], status != 0) == (small, True)  # the launcher determines the status; see docs/cluster.md
    assert not (common_path / "out").exists()
