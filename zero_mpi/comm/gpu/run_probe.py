"""Asks a process of its own whether the MPI library takes device memory.

Only a live test tells: libraries say yes that were built for it and cannot, and what they do with memory that
they take for the host's is to crash. So the test (`comm.gpu.probe`) runs in a child, which is told
nothing of this job.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

# What a launcher tells its ranks: a process that finds it takes itself for one of them. Settings stay.
JOB = re.compile(
    r"(PMI|HYDRA|HYDI|PALS|SLURM)_|(PMIX|PRTE)_(?!MCA_|PREFIX$)|OMPI_(?!MCA_|ALLOW_)|MV2_COMM_|"
    r"MPI_LOCAL(NRANKS|RANKID)$"
)
PROBE = (sys.executable, "-m", "zero_mpi.comm.gpu.probe")
PROBE_SECONDS = 20.0  # seconds for the child; the first use of a device takes some


def run_probe(command: Sequence[str], patience: float = PROBE_SECONDS) -> tuple[list[str], str]:
    """What the child said, line by line, and how it ended."""
    try:
        done = subprocess.run(
            command,
            env=outside_job(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return jsons(text), f"no answer within {patience:.0f} s"
    except OSError as error:
        return [], f"cannot be started: {error.strerror or error}"
    return jsons(done.stdout), ending(done.returncode, done.stderr)


def jsons(text: str) -> list[str]:
    """The lines that are meant for us: libraries have their own to say."""
    return [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


def ending(status: int, said: str) -> str:
    """How a process ended, for people."""
    if status < 0:
        return f"the test died of {signal.Signals(-status).name}"
    last = said.strip().splitlines()[-1:] or [""]
    return f"the test ended with status {status}: {last[0][:80]}".rstrip(": ")


def outside_job(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what the launcher of this job put into it."""
    return {name: value for name, value in environ.items() if not JOB.match(name)}
