#!/usr/bin/env python3
"""Run the tests of this folder on a CUDA-aware Open MPI, at 2 and 3 ranks, over each of its transports.

    python tests/cuda_mpi/run_cuda_mpi.py ROOT [-n 2,3] [PYTEST OPTION...]

ROOT is the folder of that Open MPI (with bin/mpiexec), or a folder with subfolders `ompi` and, if needed,
`ucx`. Without a GPU, a simulated driver is needed: ROOT/check/pretend/libcuda.so.1 or the folder in
$ZERO_MPI_PRETEND_DRIVER. The last line counts the tests, as run_sizes.py does.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN_SIZES = HERE.parent / "run_sizes.py"
DRIVER = Path("/dev/nvidiactl")
COUNTS = re.compile(r"(?m)^(\d+) passed, (\d+) failed, (\d+) skipped$")
UCX = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_pml_ucx_tls": "any",
    "OMPI_MCA_pml_ucx_devices": "any",
    "UCX_TLS": "sm,self,cuda_copy,cuda_ipc" if DRIVER.exists() else "sm,self,cuda_copy",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
WAYS = {"ob1": {"OMPI_MCA_pml": "ob1"}, "ucx": UCX}  # transport -> its variables


def main() -> int:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    root, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
    prefix = root / "ompi" if (root / "ompi").is_dir() else root
    if not (prefix / "bin" / "mpiexec").exists():
        raise SystemExit(f"MPI_ROOT={root}: expected an Open MPI in it, bin/mpiexec or ompi/bin/mpiexec")
    sizes = ["-n", "2,3"]
    if options[:1] == ["-n"]:
        sizes, options = options[:2], options[2:]
    total, failed = [0, 0, 0], False
    for name, settings in WAYS.items():
        print(f"== {name}", flush=True)
        command = [sys.executable, str(RUN_SIZES), *sizes, str(HERE), "--", *options]
        done = subprocess.run(
            command, env=environment(root, prefix) | settings, stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout, end="", flush=True)
        counts = COUNTS.findall(done.stdout)
        failed = failed or done.returncode != 0 or len(counts) != 1
        total = [before + int(n) for before, n in zip(total, counts[-1] if counts else "010", strict=True)]
    print("{} passed, {} failed, {} skipped".format(*total))
    return 1 if failed else 0


def environment(root: Path, prefix: Path) -> dict[str, str]:
    library = next(iter(sorted(prefix.glob("lib/libmpi.so.*"))), None) or prefix / "lib" / "libmpi.so"
    folders = [prefix / "lib", root / "ucx" / "lib"]
    if not DRIVER.exists():
        pretend = Path(os.environ.get("ZERO_MPI_PRETEND_DRIVER", root / "check" / "pretend"))
        if not (pretend / "libcuda.so.1").exists():
            raise SystemExit(f"no GPU, and no simulated driver: expected {pretend}/libcuda.so.1")
        folders.append(pretend)
    return os.environ | {
        **dict.fromkeys(("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"), str(prefix)),
        "PATH": f"{prefix / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), os.environ.get("LD_LIBRARY_PATH", "")]).strip(
            ":"
        ),
        "MPI4PY_LIBMPI": str(library),
        "ZERO_MPI_MPIEXEC": str(prefix / "bin" / "mpiexec"),
        "ZERO_MPI_TEST_CUDA_MPI": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "PMIX_MCA_pcompress_base_silence_warning": "1",
        "OMPI_MCA_mca_base_component_show_load_errors": "0",
    }


if __name__ == "__main__":
    sys.exit(main())
