#!/usr/bin/env python3
"""Run tests/cluster in one process, without a launcher; the report is that of run_sizes.py.

    python tests/cluster/run_cluster.py [PATH...] [-- PYTEST OPTION...]

Prints what did not run and why, and as its last line `N passed, N failed, N skipped`. The exit status is 0
only if nothing failed; where nothing can run, all is skipped.

$ZERO_MPI_CLUSTER_TIMEOUT    seconds for all of it, default 1800
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from run_sizes import print_part, read_verdict, run_part


def main() -> int:
    """Run them; returns the exit status."""
    paths, options = sys.argv[1:], []
    if "--" in paths:
        cut = paths.index("--")
        paths, options = paths[:cut], paths[cut + 1 :]
    begun = time.monotonic()
    limit = float(os.environ.get("ZERO_MPI_CLUSTER_TIMEOUT", "1800"))
    status, output = run_part(0, paths or ["tests/cluster"], options, limit)
    verdict = read_verdict(status, output)
    print_part("cluster", verdict, output, time.monotonic() - begun)
    counts = verdict.counts
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if verdict.status else 0


if __name__ == "__main__":
    sys.exit(main())
