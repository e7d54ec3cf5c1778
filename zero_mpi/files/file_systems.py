"""Properties of the file system of a folder, such as whether several ranks may write one file.

`KINDS` is the only place with these facts. Two properties decide which ranks may write. Caches: hosts may
write one file at the same time only if the file system keeps their caches coherent. NFS does not, and a
client may send a full page when only a few bytes are new, so two hosts that write to the same page could
undo each other's writes. Locks: Lustre and GPFS lock ranges of a file for a host, so hosts that write to
neighbouring ranges wait for each other, and more processes on a host do not write faster.

Properties that the code can test when it needs them are not listed here: whether two names can be exchanged
in one step (`checkpoint.folders`), whether file locks work (`launch.folder_lock`).
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
OCTAL = re.compile(r"\\([0-7]{3})")  # the kernel's escape, for example of a space in a mount point's name
EVERY = 0  # value of `writers`: every rank of a host writes


@dataclass(frozen=True)
class FileSystem:
    """Properties of one kind of file system."""

    kind: str
    hosts: bool = False  # whether several hosts may write one file at the same time
    is_known: bool = True  # if false, `hosts` is a cautious guess; --writers-per-node overrides it
    writers: int = 1  # number of ranks of a host that write, or EVERY
    is_lasting: bool = True  # whether files survive a reboot of the host


OF_A_HOST = FileSystem("", writers=EVERY)
OF_MANY = FileSystem("", hosts=True)
KINDS = {
    **dict.fromkeys(
        ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"), OF_A_HOST
    ),
    **dict.fromkeys(("tmpfs", "ramfs"), replace(OF_A_HOST, is_lasting=False)),
    **dict.fromkeys(("lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "gfs2", "ocfs2"), OF_MANY),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "9p"), FileSystem("")),
}
UNKNOWN = FileSystem("unknown", is_known=False)


def file_system(path: Path) -> FileSystem:
    """Return the properties of a path's file system, from the kernel's mounts; the path need not exist."""
    place, best, kind = Path(os.path.realpath(path)), -1, UNKNOWN.kind
    lines = list[str]()
    with suppress(OSError):
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if len(fields.split()) < 5 or not rest.split():
            continue
        point = Path(OCTAL.sub(lambda match: chr(int(match[1], 8)), fields.split()[4]))
        if len(point.parts) >= best and point in (place, *place.parents):  # the last mount hides earlier ones
            best, kind = len(point.parts), rest.split()[0]
    return replace(KINDS.get(kind, UNKNOWN), kind=kind)
