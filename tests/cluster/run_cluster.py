#!/usr/bin/env python3
"""Run tests/cluster without a launcher, in two processes because Slurm tests mostly wait.

The report has the format of run_sizes.py.

    python tests/cluster/run_cluster.py [PATH...] [-- PYTEST OPTION...]

Prints the skipped tests with reasons, and as its last line `N passed, N failed, N skipped`. The exit status
is 0 only if nothing failed. If nothing can run, all tests are skipped. Named PATHs run in one process.

$ZERO_MPI_CLUSTER_TIMEOUT    seconds for the full run, default 1800
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from run_sizes import close, compile_once, count, run_parts

HERE = Path(__file__).resolve().parent
FILES = sorted(f"tests/cluster/{path.name}" for path in HERE.glob("test_*.py"))
PARTS = {
    "slurm": [name for name in FILES if "/test_slurm" in name],
    "hosts": [name for name in FILES if "/test_slurm" not in name],
}


def main() -> int:
    paths, options = sys.argv[1:], []
    if "--" in paths:
        cut = paths.index("--")
        paths, options = paths[:cut], paths[cut + 1 :]
    queue = [("cluster", 0, paths)]
    if not paths:
        compile_once()
        queue = [(name, 0, files) for name, files in PARTS.items()]
    limit = float(os.environ.get("ZERO_MPI_CLUSTER_TIMEOUT", "1800"))
    deadline = time.monotonic() + limit
    return close(*count(run_parts(queue, len(queue), options, limit, deadline)))


if __name__ == "__main__":
    sys.exit(main())
