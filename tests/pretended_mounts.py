"""File systems that are not there: what the kernel would say of mounts, and what Lustre would of a file."""

import os
import struct

from zero_mpi.files import file_systems


def pretend(monkeypatch, folder, kind):
    """Let `folder` be on a file system of this kind; its mountinfo lies there, one for each rank."""
    mounts = folder / f"mountinfo-{os.getpid()}"
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {folder} rw shared:1 - {kind} server rw\n"
    )
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)


def plain_layout(stripes, stripe_bytes, magic=0x0BD10BD0):
    return struct.pack("=II16xIHH", magic, 1, stripe_bytes, stripes, 0) + bytes(24 * (stripes % 0xFFFF))


def composite_layout(*parts):
    """The attribute of a file in parts, which are such attributes."""
    place = 32 + 48 * len(parts)
    head = struct.pack("=IIIHHH14x", 0x0BD60BD0, place + sum(map(len, parts)), 1, 0, len(parts), 0)
    entries = b""
    for number, part in enumerate(parts):
        entries += struct.pack("=IIQQII16x", number, 0, 0, 1 << 30, place, len(part))
        place += len(part)
    return head + entries + b"".join(parts)
