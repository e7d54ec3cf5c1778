"""Training in the image of packaging/apptainer gives the same bytes as a run outside, with either MPI.

The test builds the image from a Debian mirror and downloaded wheels. Packages that may change bits have the
versions that are installed outside. Then four ranks train in the image, with its own MPICH and with an Intel
MPI that is mounted into it.
"""

import os
import platform
import re
import sys
import urllib.request
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from shutil import which

import pytest
from hosts import installed
from jobs import COMPILED, run_command
from test_command_bits import write_text

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = ROOT / "packaging/apptainer/zero_mpi.def"
BOUND = "--bind {}:/opt/mpi --env MPI4PY_LIBMPI=/opt/mpi/lib/libmpi.so.12 --env LD_LIBRARY_PATH=/opt/mpi/lib"
SIZES = "--layers 2 --dim 32 --heads 2 --context 64 --sample 0 --log-every 1"
WHEELS = "--only-binary :all: --python-version 3.13 --dest wheels -c pinned.txt"
PINNED = ("numpy", "numba", "llvmlite", "ml-dtypes")  # packages whose version may change bits
PIP = [sys.executable, "-m", "pip", "-q"]


def default(name: str) -> str:
    return re.search(rf"^    {name}=(.*)$", DEFINITION.read_text(), re.MULTILINE)[1]


def why_no_image() -> str:
    if missing := [name for name in ("apptainer", "debootstrap") if which(name) is None]:
        return f"an image needs {', '.join(missing)}: Debian's packages of these names"
    if os.geteuid() != 0 or platform.machine() != "x86_64":
        return "debootstrap needs root, and Intel MPI's wheel needs an x86-64 processor"
    try:
        installed("mpich")
        mirror = f"{default('mirror')}/dists/{default('suite')}/Release"
        urllib.request.urlopen(mirror, timeout=20).close()
    except (LookupError, OSError) as error:
        return f"an image needs MPICH on this host and access to Debian's mirror: {error}"
    return ""


def succeed(command: Sequence[str | Path], folder: Path, timeout: float = 300) -> str:
    """Run a command, with apptainer in a user namespace (limited rights); return its output or fail."""
    environ = COMPILED | {"APPTAINER_USERNS": "1"}
    status, printed, _ = run_command(command, timeout=timeout, env=environ, cwd=folder, merge=True)
    assert status == 0, f"{' '.join(map(str, command))}: status {status}\n{printed[-5000:]}"
    return printed


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    if reason := why_no_image():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("image")
    (folder / "pinned.txt").write_text("".join(f"{name}=={version(name)}\n" for name in PINNED))
    succeed([*PIP, "wheel", "--no-deps", "-w", "dist", ROOT], folder)
    wheel = next((folder / "dist").glob("*.whl"))
    succeed([*PIP, "download", *WHEELS.split(), f"{wheel}[mpich,fast]"], folder)
    arguments = {"bootstrap": "debootstrap", "index": "--no-index --find-links /mnt"}
    build = ["apptainer", "build", "--bind", f"{folder}/wheels:/mnt"]
    for name, value in arguments.items():
        build += ["--build-arg", f"{name}={value}"]
    succeed([*build, "zero_mpi.sif", DEFINITION], folder, 900)
    return folder / "zero_mpi.sif"


@pytest.mark.timeout_seconds(1800)
def test_ranks_in_containers_train_to_the_bytes_of_ranks_outside(image, tmp_path):
    flags = ["-m", "zero_mpi.train", "--steps", "20", *SIZES.split(), "--data", *write_text(tmp_path, 12)]
    succeed([sys.executable, "-m", "venv", "bound"], tmp_path)
    succeed([tmp_path / "bound/bin/python", "-m", "pip", "-q", "install", "impi-rt"], tmp_path)
    contained = ["apptainer", "-q", "exec", "--sharens"]
    python, mpich = installed("mpich")
    ways = {
        "outside": [mpich, "-n", "4", python],
        "hybrid": [mpich, "-n", "4", *contained, image, "python"],
        "bind": [tmp_path / "bound/bin/mpirun", "-n", "4", *contained,
                 *BOUND.format(tmp_path / "bound").split(), image, "python"],
    }  # fmt: skip
    states = set()
    for out, start in ways.items():
        printed = succeed([*start, *flags, "--out", out], tmp_path)
        losses = [float(loss) for loss in re.findall(r"^step +\d+/20 +loss (\S+)", printed, re.MULTILINE)]
        assert len(losses) == 20
        assert losses[-1] < losses[0]
        assert ("Intel" in succeed([*start, "-m", "mpi4py", "--mpi-lib-version"], tmp_path)) == (
            out == "bind"
        )
        files = [(tmp_path / out / "latest" / f"{name}.gguf").read_bytes() for name in ("model", "optimizer")]
        states.add((re.search(r", state (\w+)$", printed, re.MULTILINE)[1], *files))
    assert len(states) == 1
