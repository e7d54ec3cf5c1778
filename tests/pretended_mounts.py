"""Simulated file systems: a replacement for the kernel's list of mounts."""

import os

from zero_mpi.files import file_systems


def pretend(monkeypatch, folder, kind):
    """Make `folder` look like a mount of file system `kind`, by a mountinfo file in it for each rank."""
    mounts = folder / f"mountinfo-{os.getpid()}"
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {folder} rw shared:1 - {kind} server rw\n"
    )
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
