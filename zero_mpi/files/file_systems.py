"""File systems: which one a folder is on, and what follows for ranks that write a file there together.

`KINDS` is the one place of what is known. Two things decide who may write. Caches: hosts may write one file
at once only where the file system keeps their caches in step. An NFS client does not, and it may send a whole
page where a few bytes of it are new: two hosts whose ranges meet in a page could undo each other's. Locks:
Lustre and GPFS lock ranges of a file for a host, so many hosts that write near each other take locks from
one another, and more processes of a host do not write faster into them.

What can be tried where it is needed is not looked up here: whether two names can be exchanged in one step
(`checkpoint.folders`), whether there are locks (`launch.folder_lock`).
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
OCTAL = re.compile(r"\\([0-7]{3})")
EVERY = 0  # rank of a host writes


@dataclass(frozen=True)
class FileSystem:
    """What is known of one kind.

    hosts     several of them may write one file at once
    known     otherwise `hosts` is what is safe, and who knows better may say so (--writers-per-node)
    writers   ranks of a host that write: so many, or EVERY
    striped   a file is laid out in stripes that can be asked for when it is made
    lasting   what is there outlives the host
    """

    kind: str
    hosts: bool = False
    known: bool = True
    writers: int = 1
    striped: bool = False
    lasting: bool = True


OF_A_HOST = FileSystem("", writers=EVERY)
OF_MANY = FileSystem("", hosts=True)
KINDS = {
    **dict.fromkeys(
        ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"), OF_A_HOST
    ),
    **dict.fromkeys(("tmpfs", "ramfs"), replace(OF_A_HOST, lasting=False)),
    **dict.fromkeys(("gpfs", "beegfs", "ceph", "wekafs", "panfs", "gfs2", "ocfs2"), OF_MANY),
    "lustre": replace(OF_MANY, striped=True),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "9p"), FileSystem("")),
}
UNKNOWN = FileSystem("unknown", known=False)


def file_system(path: Path) -> FileSystem:
    """What is known of the file system that a path is on, or would be."""
    kind = kind_of(path)
    return replace(KINDS.get(kind, UNKNOWN), kind=kind)


def kind_of(path: Path) -> str:
    """The type of the file system that a path is on, as the kernel calls it: ext4, nfs4, lustre."""
    place, best, kind = Path(os.path.realpath(path)), -1, "unknown"
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return kind
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if len(fields.split()) < 5 or not rest.split():
            continue
        point = Path(OCTAL.sub(lambda found: chr(int(found[1], 8)), fields.split()[4]))  # blanks are numbers
        if len(point.parts) >= best and (
            point == place or point in place.parents
        ):  # the last one hides others
            best, kind = len(point.parts), rest.split()[0]
    return kind


# --------------------------------------------------------------------------------------------- stripes

STRIPE_BYTES = 4 << 20  # of a stripe: what Lustre sends to a server at once
BYTES_A_STRIPE = 1 << 30  # of a file, for each server that it is laid out on
MOST_STRIPES = 64
ATTRIBUTE = "lustre.lov"  # where Lustre shows the layout of a file, and what a folder hands on to new ones
PLAIN, COMPOSITE = (0x0BD10BD0, 0x0BD30BD0), 0x0BD60BD0  # of the kernel's interface, in its byte order
HEADER_BYTES, ENTRY_BYTES, ENTRY_OFFSET = 32, 48, 24  # of a layout in parts
ALL = 0xFFFF


@dataclass(frozen=True)
class StripeLayout:
    """The stripes of a file, of its widest part where it has several; ALL: one on each server."""

    stripes: int
    stripe_bytes: int
    parts: int = 1

    def __str__(self) -> str:
        count = "a stripe on every server" if self.stripes == ALL else f"{self.stripes} of them"
        several = f", the widest of {self.parts} parts" if self.parts > 1 else ""
        return f"{count}, {self.stripe_bytes >> 10} KiB each{several}"


def stripe_hints(folder: Path, nbytes: int, writers: int) -> dict[str, str]:
    """The hints of MPI-IO for a new file in `folder`; none where it has no stripes, or they are settled.

    A layout that somebody gave to the folder stays: its files have it, and its owner knows the servers.
    """
    if not file_system(folder).striped or layout_of(folder) is not None:
        return {}
    count = min(max(writers, nbytes // BYTES_A_STRIPE), MOST_STRIPES, nbytes // STRIPE_BYTES)
    return {"striping_factor": str(count), "striping_unit": str(STRIPE_BYTES)} if count > 1 else {}


def layout_of(path: Path) -> StripeLayout | None:
    """The layout of a file, or the one that a folder was given; None where there is none to be read."""
    try:
        return read_layout(os.getxattr(path, ATTRIBUTE))
    except OSError:
        return None


def read_layout(raw: bytes) -> StripeLayout | None:
    """The layout in the bytes of Lustre's attribute; None if they are of another kind, or too few."""
    try:
        (magic,) = struct.unpack_from("=I", raw)
        if magic in PLAIN:
            return read_part(raw, 0)
        if magic != COMPOSITE:
            return None
        (count,) = struct.unpack_from("=H", raw, 14)
        places = range(HEADER_BYTES + ENTRY_OFFSET, HEADER_BYTES + ENTRY_BYTES * count, ENTRY_BYTES)
        parts = [read_part(raw, struct.unpack_from("=I", raw, place)[0]) for place in places]
    except struct.error:
        return None
    return replace(max(parts, key=lambda part: part.stripes), parts=count) if parts else None


def read_part(raw: bytes, place: int) -> StripeLayout:
    """One part of a layout; struct.error where the bytes end before."""
    nbytes, stripes = struct.unpack_from("=IH", raw, place + 24)
    return StripeLayout(stripes, nbytes)
