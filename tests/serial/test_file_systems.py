"""Tests of file systems in the kernel's list of mounts, and of the ranks that write to them."""

from pathlib import Path

import pytest

from zero_mpi.checkpoint.parallel_write import writer_of_each
from zero_mpi.files import file_systems
from zero_mpi.files.file_systems import KINDS, UNKNOWN, file_system

# Lines of /proc/self/mountinfo on clusters.
MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
25 22 0:5 / /dev rw,nosuid shared:2 - devtmpfs udev rw,size=131072k
26 25 0:23 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw
41 22 0:40 / /scratch rw,relatime - lustre 10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch rw,flock,lazystatfs
42 22 0:41 / /gpfs/data rw,relatime - gpfs data rw
43 22 0:42 / /home rw,relatime shared:9 - autofs auto.home rw,fd=5,pgrp=1,timeout=300
44 43 0:43 / /home/ann rw,relatime shared:10 - nfs4 filer:/home/ann rw,vers=4.2,rsize=1048576,local_lock=none
45 22 0:44 / /old rw,relatime - nfs filer:/old rw,vers=3
46 22 0:45 / /my\040data\134x rw - beegfs beegfs_nodev rw
47 22 0:46 / /cloud rw - fuse.s3fs s3fs rw
48 22 0:47 / /scratch/local rw - xfs /dev/nvme1n1 rw
49 22 0:48 / /twice rw - ext4 /dev/sdb rw
50 22 0:49 / /twice rw - wekafs weka rw
no line of a mount - at all
"""
PLACES = {"/var/run-1": "ext4", "/dev/shm/x": "tmpfs", "/scratch/me/run/step-00000001": "lustre"}
PLACES |= {"/scratch-not": "ext4", "/gpfs/data": "gpfs", "/home/bob": "autofs", "/home/ann/run": "nfs4"}
PLACES |= {"/old/run": "nfs", "/my data\\x/run": "beegfs", "/cloud/run": "fuse.s3fs"}
PLACES |= {"/scratch/local/run": "xfs", "/twice/run": "wekafs"}


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "mountinfo")


@pytest.mark.parametrize("place", PLACES)
def test_the_kind_is_that_of_the_nearest_mount(place, mounts):
    assert file_system(Path(place)).kind == PLACES[place]


# Nodes of the ranks: four nodes of 3, 3, 1 and 2 ranks, and two nodes whose ranks alternate.

NODES, TURN = [0, 0, 0, 1, 1, 1, 2, 3, 3], [0, 1, 0, 1, 0, 1]
ONE, EACH = (0,) * 9, tuple(range(9))
ONE_A_NODE = (0, 0, 0, 3, 3, 3, 6, 7, 7)
CASES = {
    "lustre": (KINDS["lustre"], NODES, None, ONE_A_NODE),
    "gpfs": (KINDS["gpfs"], NODES, None, ONE_A_NODE),
    "gpfs in turn": (KINDS["gpfs"], TURN, None, (0, 1, 0, 1, 0, 1)),
    "gpfs, 2 of each node": (KINDS["gpfs"], NODES, 2, (0, 0, 2, 3, 3, 5, 6, 7, 8)),
    "gpfs, all": (KINDS["gpfs"], NODES, 9, EACH),
    "gpfs, one node": (KINDS["gpfs"], [0] * 4, None, (0,) * 4),
    "nfs": (KINDS["nfs4"], NODES, None, ONE),
    "nfs, asked for more": (KINDS["nfs4"], NODES, 2, ONE),
    "nfs, one node": (KINDS["nfs4"], [0] * 4, None, (0,) * 4),
    "nfs, one node, asked for more": (KINDS["nfs4"], [0] * 4, 2, (0, 0, 2, 2)),
    "unknown": (UNKNOWN, NODES, None, ONE),
    "unknown, somebody knows it": (UNKNOWN, NODES, 1, ONE_A_NODE),
    "ext4": (KINDS["ext4"], [0] * 4, None, (0, 1, 2, 3)),
    "ext4, one": (KINDS["ext4"], [0] * 4, 1, (0,) * 4),
    "ext4 that each node has of its own": (KINDS["ext4"], NODES, None, ONE),
}


@pytest.mark.parametrize("case", CASES)
def test_who_writes(case):
    system, nodes, a_node, expected = CASES[case]
    assert writer_of_each(nodes, system, a_node) == expected
