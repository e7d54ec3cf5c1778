"""A child process that tests whether the MPI library takes device memory.

Only a live test is certain: some libraries claim support, and then crash on device memory. So the test
(`comm.gpu.probe`) runs in a child process that knows nothing of this job.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Variables of a launcher for its ranks: a process that finds them takes itself for a rank. Settings stay.
JOB = re.compile(
    r"(PMI|HYDRA|HYDI|PALS|SLURM)_|(PMIX|PRTE)_(?!MCA_|PREFIX$)|OMPI_(?!MCA_|ALLOW_)|MV2_COMM_|"
    r"MPI_LOCAL(NRANKS|RANKID)$"
)
PROBE = (sys.executable, "-m", "zero_mpi.comm.gpu.probe")
PROBE_SECONDS = 20.0  # seconds for the child; the first use of a device takes some


def run_probe(command: Sequence[str], patience: float = PROBE_SECONDS) -> tuple[list[str], str]:
    """Return the lines that the child printed, and how it ended."""
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
    """Return the lines that are JSON: libraries print lines of their own."""
    return [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


def ending(status: int, said: str) -> str:
    """Return a text for messages on how a process ended."""
    if status < 0:
        return f"the test died of {signal.Signals(-status).name}"
    last = said.strip().splitlines()[-1:] or [""]
    return f"the test ended with status {status}: {last[0][:80]}".rstrip(": ")


def outside_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of this job's launcher."""
    return {name: value for name, value in environ.items() if not JOB.match(name)}
