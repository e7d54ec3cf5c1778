"""Cache of compiled kernels between runs: a folder for this machine type and these versions.

Its name is a hash of everything that changes the code, so its content is never out of date, and machines of
different kinds may share a home. Code loaded from it is executed, so it must belong to this user alone. If no
such folder can be written, a temporary one is used, and kernels are compiled in every run.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zero_mpi.environment import portable

SOURCES = Path(__file__).parent / "cpu"
PACKAGES = ("numba", "llvmlite", "numpy", "scipy")
COMPLETE = "complete-{}"  # a file that marks that all kernels of a type exist


def installed(package: str) -> str:
    """Return a package's version, or an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def processor() -> str:
    """Return the processor that code is compiled for: the pinned one, or the name that the system gives."""
    if portable.active:
        return f"{portable.TARGET} {portable.FEATURES}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in wanted))


def key() -> str:
    """Return a hash of everything that the code depends on."""
    digest = hashlib.sha256()
    place = str(SOURCES)  # numba's cache depends on it too
    for text in (
        place,
        platform.python_version(),
        platform.machine(),
        processor(),
        *map(installed, PACKAGES),
    ):
        digest.update(text.encode() + b"\0")
    sources = [SOURCES.parent / name for name in ("elementary.py", "block_kinds.py", "../arguments.py")]
    for path in [*sources, *sorted(SOURCES.parent.glob("*reference.py")), *sorted(SOURCES.glob("*.py"))]:
        digest.update(path.read_bytes() + b"\0")
    return f"numba-{installed('numba')}-{digest.hexdigest()[:12]}"


def candidates() -> Iterator[Path]:
    """Yield the possible parents of the folder, best first."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(given)
    if given := os.environ.get("XDG_CACHE_HOME"):
        yield Path(given) / "zero_mpi"
    elif home := os.environ.get("HOME"):
        yield Path(home) / ".cache" / "zero_mpi"
    yield Path(tempfile.gettempdir()) / f"zero_mpi-{os.getuid()}"


def is_ours(folder: Path) -> bool:
    """Return whether only this user can write into the folder; make it if it does not exist."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return False
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


@cache
def folder() -> Path:
    """Return the cache folder, or a temporary one if no parent is usable; never fails."""
    name = key()
    for base in candidates():
        if is_ours(base / name):
            return base / name
    alone = Path(tempfile.mkdtemp(prefix="zero_mpi-"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    return alone


def is_complete(kind: str) -> bool:
    """Return whether all kernels of a type ("float32", "bfloat16") are in the folder."""
    return (folder() / COMPLETE.format(kind)).exists()


def mark_complete(kind: str) -> None:
    """Mark the folder as having all kernels of a type."""
    try:
        (folder() / COMPLETE.format(kind)).touch()
    except OSError:  # then the next run announces a compilation that does not happen
        return
