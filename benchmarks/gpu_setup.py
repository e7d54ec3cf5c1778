"""Sets up a bare GPU machine for the checks: finds its GPU, a Python with the packages, and an MPI.

This module runs before anything is installed, so it uses only the standard library. It makes the virtual
environment of `--venv`, which also sees the packages of the Python that runs this module, for example an
installed CuPy. Missing packages are installed from a folder of wheels or from the package index.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRETEND = ROOT / "tests" / "pretend"
MORE = ("pytest>=8.3", "pytest-mpi>=0.6", "hypothesis>=6.112", "mpich>=4.3", "numba>=0.61")
# Packages needed in addition to the extras, and their dependencies, so that messages list all wheels.
GPU = ("nvmath-python>=0.9", "nvidia-cudnn-frontend>=1.18", "cuda-pathfinder>=1.3.4", "cuda-core>=0.5")
INSTALL_SECONDS = 240
TOO_SLOW = f"not done in {INSTALL_SECONDS} s"


class NotReady(Exception):
    """Error with a message of one line, which says what is missing and what to do."""


@dataclass
class Ready:
    """A prepared interpreter, the environment variables for its programs, and notes on the setup."""

    python: str
    env: dict[str, str]
    notes: list[str] = field(default_factory=list)


def quietly(command: Sequence[str], env: Mapping[str, str] | None = None, **more: Any) -> Any:
    """Run a command without input. Return the completed process, with its output."""
    held = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, env=env, **held, **more)


def cuda_version() -> int:
    """Return the driver's CUDA version, such as 13. Raises NotReady without a driver or GPU."""
    count, version = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotReady(f"no GPU: {error}; --pretend tries this script without one") from error
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        raise NotReady(f"no GPU: the driver finds {count.value} (status {status}); --pretend needs none")
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000


def requirements(cuda: int) -> list[str]:
    """Return the requirements of zero_mpi, with the extras that fit this version of CUDA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras[f"cuda{cuda}"], *extras.get(f"cudnn{cuda}", ()), *MORE]
    known = {name_of(requirement) for requirement in wanted}
    more = [*GPU, f"cuda-bindings=={cuda}.*"]
    return wanted + [requirement for requirement in more if name_of(requirement) not in known]


def name_of(requirement: str) -> str:
    """Return the name of the package in a requirement."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def make_venv(folder: Path) -> str:
    """Make a virtual environment that also sees this Python's packages. Return its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        done = quietly(command)
        if done.returncode:
            raise NotReady(f"--venv {folder}: cannot be made: {last_line(done.stderr or done.stdout)}")
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    for site in folder.glob("lib/python*/site-packages"):
        (site / "seen.pth").write_text("".join(f"{path}\n" for path in seen))
    return str(python)


def versions(python: str, wanted: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return which wanted packages an interpreter has: name -> version."""
    code = (
        "import importlib.metadata as m, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, m.version(name))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    done = quietly([python, "-c", code, *map(name_of, wanted)], env)
    if done.returncode:
        raise NotReady(f"{python}: {last_line(done.stderr)}")
    return dict(line.split() for line in done.stdout.splitlines())


def fits(requirement: str, version: str) -> bool:
    """Return whether a version satisfies a requirement. Without pip to check this, return True."""
    try:
        from pip._vendor.packaging.requirements import Requirement
    except ImportError:
        return True
    return bool(Requirement(requirement).specifier.contains(version, prereleases=True))


def install(python: str, wanted: list[str], wheels: Path | None, env: Mapping[str, str]) -> list[str]:
    """Install missing packages. Return notes. Raises NotReady if CuPy or NumPy cannot be installed.

    A package with a wrong version is installed again; if this fails, the present version is used. pip first
    installs all packages with their dependencies, then the missing ones without dependencies, and then, if
    there are wheels, each missing one alone.
    """
    notes: list[str] = []
    absent = lacking(python, wanted, env)
    for more in ([], ["--no-deps"]):
        if not absent:
            break
        said = pip(python, [*more, *absent], wheels, env)
        notes.append(f"pip install {' '.join(absent)}: {said}")
        absent = lacking(python, wanted, env)
        if said == TOO_SLOW:  # leaves the remaining time to the checks
            break
    for name in absent if wheels else ():  # a missing wheel must not prevent the installation of others
        pip(python, ["--no-deps", name], wheels, env)
    absent = lacking(python, wanted, env)
    if absent:
        had = versions(python, absent, env)
        names = [f"{name} ({had[name]} found)" if name in had else name for name in map(name_of, absent)]
        notes.append(f"not installed: {', '.join(names)}. {what_to_bring(absent)}")
        if needed(name for name in map(name_of, absent) if name not in had):
            raise NotReady(notes[-1])
    return notes + loadable_mpi(python, wheels, env)


def needed(absent: Iterable[str]) -> bool:
    """Return whether the checks cannot run without one of these packages."""
    return any(name.startswith(("cupy", "numpy")) for name in absent)


def lacking(python: str, wanted: list[str], env: Mapping[str, str]) -> list[str]:
    """Return the requirements that the packages of an interpreter do not satisfy."""
    found = versions(python, wanted, env)
    return [one for one in wanted if name_of(one) not in found or not fits(one, found[name_of(one)])]


def loadable_mpi(python: str, wheels: Path | None, env: Mapping[str, str]) -> list[str]:
    """Install the wheel of mpi4py if the installed mpi4py cannot be loaded. Return notes."""
    done = quietly([python, "-c", "from mpi4py import MPI"], env)
    if done.returncode == 0 or not versions(python, ["mpi4py"], env):
        return []
    said = pip(python, ["--no-deps", "--ignore-installed", "mpi4py"], wheels, env)
    return [f"mpi4py could not be loaded ({last_line(done.stderr)}); pip install of its wheel: {said}"]


def pip(python: str, arguments: list[str], wheels: Path | None, env: Mapping[str, str]) -> str:
    """Run this Python's pip for another interpreter. Return "done" or the error."""
    where = ["--no-index", "--find-links", str(wheels)] if wheels else ["--timeout", "5", "--retries", "0"]
    tool = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q"]
    try:
        done = quietly([*tool, "--no-compile", *where, *arguments], env, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        return TOO_SLOW
    return "done" if done.returncode == 0 else last_line(done.stderr or done.stdout)


def what_to_bring(absent: list[str]) -> str:
    """Return instructions for bringing wheels to a machine that cannot reach a package index."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"Without a package index: pip download --only-binary=:all: --python-version {version} -d WHEELS "
        f"{' '.join(map(shlex.quote, absent))} on another machine, then --wheels WHEELS here"
    )


def last_line(said: str) -> str:
    """Return the last line of a program's output."""
    return (said.strip().splitlines() or ["no output"])[-1]


def library_folders(python: str) -> list[str]:
    """Return the library folders of NVIDIA's packages that `python` sees."""
    done = quietly([python, "-c", "import sys; print('\\n'.join(sys.path))"])
    roots = [Path(path) / "nvidia" for path in done.stdout.splitlines() if path]
    found = [folder for root in roots if root.is_dir() for folder in sorted(root.glob("*/lib"))]
    return list(dict.fromkeys(map(str, found)))


def environment(python: str, scratch: Path) -> dict[str, str]:
    """Return the environment variables of programs: paths of the project, kernel cache and libraries."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    folders, own = library_folders(python), Path(sys.prefix) / "lib"
    folders += [str(own)] if any(own.glob("libmpi.so*")) else []  # folder of an MPI from PyPI
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [env.get("LD_LIBRARY_PATH"), *folders]))
    env["CUPY_CACHE_DIR"] = str(scratch / "cupy")
    places = dict.fromkeys(str(Path(place).parent) for place in (python, sys.executable))
    env["PATH"] = os.pathsep.join([*places, env.get("PATH", "")])
    env |= {"PYTHONUNBUFFERED": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def make_ready(venv: Path | None, wheels: Path | None, scratch: Path) -> Ready:
    """Return an interpreter with the packages that the checks need. Raises NotReady if there is none."""
    cuda = cuda_version()
    if cuda not in (12, 13):
        raise NotReady(f"the driver supports CUDA {cuda}; expected 12 or 13")
    if wheels is not None and not wheels.is_dir():
        raise NotReady(f"--wheels {wheels}: no such folder")
    python = sys.executable if venv is None else make_venv(venv)
    env, wanted = environment(python, scratch), requirements(cuda)
    if venv is None:
        had = versions(python, wanted, env)
        absent = [name for name in map(name_of, wanted) if name not in had]
        if needed(absent):
            raise NotReady(
                f"{python} lacks {', '.join(absent)}; --venv DIR makes an environment that has them"
            )
        return Ready(python, env, [f"not installed: {', '.join(absent)}"] if absent else [])
    notes = install(python, wanted, wheels, env)
    return Ready(python, environment(python, scratch), notes)


def make_pretend(scratch: Path) -> Ready:
    """Return this Python with the CuPy in tests/pretend, which needs no GPU."""
    env = environment(sys.executable, scratch)
    env["PYTHONPATH"] = os.pathsep.join([str(PRETEND), env["PYTHONPATH"]])
    return Ready(sys.executable, env, ["pretend: no GPU is used, so the measured times mean nothing"])


# ------------------------------------------------------------------------------------------------------ MPI


def launcher(ready: Ready) -> list[str] | None:
    """Return the mpiexec next to the interpreter, or else the one on PATH."""
    found = shutil.which("mpiexec", path=ready.env["PATH"])
    return None if found is None else [found]


def unpack(given: Path, scratch: Path) -> Path:
    """Return the folder that contains bin/mpirun; unpack it from an archive if needed. Raises NotReady."""
    folder = given
    if given.is_file():
        folder = scratch / "mpi"
        folder.mkdir(parents=True, exist_ok=True)
        untar(given, folder)
    for place in (folder, *sorted(folder.glob("*")), *sorted(folder.glob("*/*"))):
        if (place / "bin" / "mpirun").exists():
            return place
    raise NotReady(f"--mpi-root {given}: neither it nor a folder in it has bin/mpirun")


def untar(archive: Path, folder: Path) -> None:
    """Unpack an archive with Python, or with tar if Python cannot read it (e.g. zstd). Raises NotReady."""
    with contextlib.suppress(tarfile.TarError, TypeError), tarfile.open(archive) as opened:
        opened.extractall(folder, filter="tar")
        return
    done = quietly(["tar", "-xf", str(archive), "-C", str(folder)])
    if done.returncode:
        raise NotReady(f"--mpi-root {archive}: {last_line(done.stderr)}; unpack it and give the folder")


UCX_ON = ["--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"]
ATTEMPTS: dict[str, tuple[list[str], dict[str, str]]] = {  # settings by which Open MPI can move device memory
    "ucx with IPC": (UCX_ON, {"UCX_TLS": "sm,self,cuda_copy,cuda_ipc"}),
    "ucx without IPC": (UCX_ON, {"UCX_TLS": "sm,self,cuda_copy"}),
    "ob1 without IPC": (["--mca", "pml", "ob1", "--mca", "btl_smcuda_use_cuda_ipc", "0"], {}),
}


def aware(root: Path, ready: Ready, attempt: str) -> tuple[list[str], dict[str, str]]:
    """Return launcher and environment for the Open MPI in `root`, which may have moved since its build."""
    flags, more = ATTEMPTS[attempt]
    env = ready.env | dict.fromkeys(("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"), str(root)) | more
    env["PATH"] = os.pathsep.join([str(root / "bin"), env["PATH"]])
    env["LD_LIBRARY_PATH"] = os.pathsep.join([str(root / "lib"), env["LD_LIBRARY_PATH"]])
    env["PMIX_MCA_pcompress_base_silence_warning"] = "1"
    env["OMPI_MCA_mca_base_component_show_load_errors"] = "0"
    library = root / "lib" / "libmpi.so.40"
    if library.exists():
        env["MPI4PY_LIBMPI"] = str(library)
    return [str(root / "bin" / "mpirun"), "--oversubscribe", "--bind-to", "none", *flags], env
