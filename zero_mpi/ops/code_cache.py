"""Cache of compiled kernels: one folder per machine type and set of package versions, kept between runs.

The folder's name contains a hash of everything that changes the code. So its content is never out of date,
and machines of different types may share a home directory. Code from the folder is executed, so the folder
must belong to this user. If no such folder can be written, every run compiles into a temporary folder.
"""

import atexit
import contextlib
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
COMPLETE = "complete-{}"  # name of the file that marks a folder with all kernels of a type


def package_version(package: str) -> str:
    """Return a package's version, or an empty string if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def processor() -> str:
    """Return the CPU that code is compiled for: the pinned CPU, or this CPU as /proc/cpuinfo describes it."""
    if portable.active:
        return f"{portable.TARGET} {portable.FEATURES}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in fields))


def key() -> str:
    """Return the folder's name, which contains a hash of everything that the code depends on."""
    digest = hashlib.sha256()
    # The path is also part of the key of numba's own cache.
    facts = str(SOURCES), platform.python_version(), platform.machine(), processor()
    for text in (*facts, *map(package_version, PACKAGES)):
        digest.update(text.encode() + b"\0")
    sources = [SOURCES.parent / name for name in ("elementary.py", "block_kinds.py", "../arguments.py")]
    for path in [*sources, *sorted(SOURCES.parent.glob("*reference.py")), *sorted(SOURCES.glob("*.py"))]:
        digest.update(path.read_bytes() + b"\0")
    return f"numba-{package_version('numba')}-{digest.hexdigest()[:12]}"


def candidates() -> Iterator[Path]:
    """Yield the directories in which the cache folder may be created, best first."""
    if path := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(path)
    if path := os.environ.get("XDG_CACHE_HOME"):
        yield Path(path) / "zero_mpi"
    elif home := os.environ.get("HOME"):
        yield Path(home) / ".cache" / "zero_mpi"
    yield Path(tempfile.gettempdir()) / f"zero_mpi-{os.getuid()}"


def is_ours(folder: Path) -> bool:
    """Return whether only this user can write to the folder; create the folder if it does not exist."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.stat()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return False
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


@cache
def folder() -> Path:
    """Return the cache folder, or a temporary folder if no directory is usable. It never raises."""
    name = key()
    for base in candidates():
        if is_ours(base / name):
            return base / name
    directory = Path(tempfile.mkdtemp(prefix="zero_mpi-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def is_complete(kind: str) -> bool:
    """Return whether the folder has all kernels of a type ("float32", "bfloat16", "generation")."""
    return (folder() / COMPLETE.format(kind)).exists()


def mark_complete(kind: str) -> None:
    with contextlib.suppress(OSError):  # harmless: the next run only prints that it compiles
        (folder() / COMPLETE.format(kind)).touch()
