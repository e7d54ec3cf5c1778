"""Where compiled kernels are kept between runs: a folder for this machine type and these versions.

Its name changes with whatever changes the code, so what is in it is never out of date, and machines of
different kinds may share a home. What is loaded from it is executed: it belongs to this user alone. Where no
such folder can be written, a temporary one serves, and kernels are compiled in every run.
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
COMPLETE = "complete-{}"  # a file that says that all kernels of a type are there


def installed(package: str) -> str:
    """A package's version, or an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def processor() -> str:
    """What code is compiled for: what is pinned, or the processor's name as far as the system tells."""
    if portable.active:
        return f"{portable.TARGET} {portable.FEATURES}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in wanted))


def key() -> str:
    """A name for everything that the code depends on."""
    digest = hashlib.sha256()
    place = str(SOURCES)  # numba asks for it too
    for text in (
        place,
        platform.python_version(),
        platform.machine(),
        processor(),
        *map(installed, PACKAGES),
    ):
        digest.update(text.encode() + b"\0")
    beside = [SOURCES.parent / name for name in ("elementary.py", "reference.py", "rowsums.py")]
    for path in [*beside, *sorted(SOURCES.glob("*.py"))]:
        digest.update(path.read_bytes() + b"\0")
    return f"numba-{installed('numba')}-{digest.hexdigest()[:12]}"


def candidates() -> Iterator[Path]:
    """Where the folder may lie, best first."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(given)
    if given := os.environ.get("XDG_CACHE_HOME"):
        yield Path(given) / "zero_mpi"
    elif home := os.environ.get("HOME"):
        yield Path(home) / ".cache" / "zero_mpi"
    yield Path(tempfile.gettempdir()) / f"zero_mpi-{os.getuid()}"


def is_ours(folder: Path) -> bool:
    """Whether this user, and nobody else, can write into the folder; it is made if it is not there."""
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
    """The folder; never fails."""
    name = key()
    for base in candidates():
        if is_ours(base / name):
            return base / name
    alone = Path(tempfile.mkdtemp(prefix="zero_mpi-"))
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    return alone


def is_complete(kind: str) -> bool:
    """Whether all kernels of a type ("float32", "bfloat16") have been compiled into the folder before."""
    return (folder() / COMPLETE.format(kind)).exists()


def mark_complete(kind: str) -> None:
    """Write down that the folder has them all."""
    try:
        (folder() / COMPLETE.format(kind)).touch()
    except OSError:  # then the next run says that it compiles, and does not
        return
