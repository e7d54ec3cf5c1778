#!/usr/bin/env python3
"""Test the result of `make dist` as a new user would: outside the tree, in a new environment.

    PYTHON tools/try_dist.py [FOLDER]

It uses the Python that runs it (3.11 or newer), and packages from the index that pip uses. The wheel is
installed with MPICH, `zero-mpi --version` prints the version, four ranks train for 20 steps on a small text,
and the run reports that it is done. The source archive has the files that a packager needs, and builds the
same wheel. Prints a line for each test. At the first failure it prints the cause and exits with status 1.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

DIST = Path(__file__).resolve().parents[1] / "dist"
TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(400))
SIZES = "--layers 2 --dim 32 --heads 2 --context 64 --sample 0 --log-every 1"
TRAIN = f"mpirun -n 4 python -m zero_mpi.train --steps 20 --data text.txt {SIZES} --out run"
# Files that the source archive must have, apart from the package.
WANTED = ("LICENSE", "README.md", "CHANGELOG.md", "Makefile", "docs/index.md", "docs/images/packages.svg",
          "tests/serial/test_docs.py", "examples/custom_loop.py", "packaging/conda/recipe.yaml")  # fmt: skip


def the_one(folder: Path, pattern: str) -> Path:
    """Return the only file that matches a pattern. Exit if there is not exactly one."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder}: expected one {pattern}, found {len(found)}: run `make dist` first")
    return found[0].resolve()


def run(command: str, folder: Path, programs: Path, limit: float = 300) -> str:
    """Return a command's output. Its program is looked up in `programs` first. Exit if the command fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    kept["PATH"] = f"{programs}:{kept['PATH']}"
    done = subprocess.run(
        command.split(), cwd=folder, env=kept, capture_output=True, text=True, timeout=limit
    )
    if done.returncode:
        sys.exit(f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def try_wheel(wheel: Path, folder: Path, programs: Path) -> None:
    """Install the wheel, ask for its version, and train a model with it."""
    run(f"python -m pip --disable-pip-version-check -q install {wheel}[mpich]", folder, programs)
    version = wheel.name.split("-")[1]
    said = run("zero-mpi --version", folder, programs).splitlines()[0]
    if said != f"zero_mpi {version}":
        sys.exit(f"zero-mpi --version: expected zero_mpi {version}, found {said}")
    print(f"{said} installed from {wheel.name} under Python {sys.version.split()[0]}")
    (folder / "text.txt").write_text(TEXT)
    printed = run(TRAIN, folder, programs)
    losses = [float(loss) for loss in re.findall(r"^step +\d+/20 +loss (\S+)", printed, re.MULTILINE)]
    state = json.loads((folder / "run" / "status.json").read_text())["state"]
    if len(losses) != 20 or losses[-1] >= losses[0] or state != "done":
        sys.exit(
            f"{TRAIN}: expected 20 losses that fall and the state done, found {losses}, {state}\n{printed}"
        )
    print(f"{TRAIN.split(' --data')[0]}: loss {losses[0]} to {losses[-1]}, {state}")


def try_sources(archive: Path, wheel: Path, folder: Path, programs: Path) -> None:
    """Check which files the source archive has, and build the wheel from it."""
    with tarfile.open(archive) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    missing = [name for name in WANTED if name not in names]
    if missing:
        sys.exit(f"{archive.name}: {', '.join(missing)} not found")
    run(f"python -m pip --disable-pip-version-check -q wheel --no-deps -w built {archive}", folder, programs)
    if the_one(folder / "built", "*.whl").read_bytes() != wheel.read_bytes():
        sys.exit(f"{archive.name}: expected the bytes of {wheel.name}, found other bytes")
    print(f"{archive.name}: {len(names)} files, with tests and docs; it builds the wheel to the same bytes")


def main() -> None:
    """Find the wheel and the source archive, and test both."""
    dist = Path(sys.argv[1]) if len(sys.argv) > 1 else DIST
    wheel, archive = the_one(dist, "*.whl"), the_one(dist, "*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="try-dist-") as name:
        folder = Path(name)
        venv.create(folder / "environment", with_pip=True)
        try_wheel(wheel, folder, folder / "environment" / "bin")
        try_sources(archive, wheel, folder, folder / "environment" / "bin")


if __name__ == "__main__":
    main()
