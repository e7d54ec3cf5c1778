"""`--bits portable`: one instruction set for all computation, so that all processors give identical results.

Libraries choose their code by the processor: OpenBLAS its kernels and blocks, numba its target, NumPy its
loops. Libraries read this choice from environment variables when they are loaded, so a process that starts
without these variables restarts with them. The C library's logarithms and cosines differ between its
versions; functions of `ops.elementary` replace them. The instruction set is x86-64-v3 (AVX2 and FMA), which
most Intel processors have had since 2013 and AMD processors since 2015.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence

from zero_mpi import environment

VARIABLE = "ZERO_MPI_BITS"
NATIVE, PORTABLE = CHOICES = ("native", "portable")
LEVEL, KERNELS, TARGET = "x86-64-v3", "Haswell", "haswell"  # the common name, OpenBLAS's name and LLVM's name
MUST_HAVE = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm")  # required CPU flags, by Linux's names
FEATURES = (
    "avx", "avx2", "bmi", "bmi2", "cmov", "cx16", "f16c", "fma", "fxsr", "lzcnt", "mmx", "movbe", "popcnt",
    "sse", "sse2", "sse3", "sse4.1", "sse4.2", "ssse3", "xsave",
)  # fmt: skip
BEYOND = "X86_V4 AVX512_ICL AVX512_SPR"  # features that NumPy's loops may not use, by NumPy's current names
BEYOND_BEFORE = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"  # up to NumPy 2.3

active = False  # whether this process is pinned to the instruction set


def pins() -> dict[str, str]:
    """Return the variables that pin the libraries to one instruction set."""
    return {
        "OPENBLAS_CORETYPE": KERNELS,
        "OPENBLAS_L2_SIZE": "512",
        "NUMBA_CPU_NAME": TARGET,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in FEATURES),
        "NUMBA_DISABLE_INTEL_SVML": "1",
        "NPY_DISABLE_CPU_FEATURES": BEYOND if numpy_version() >= (2, 4) else BEYOND_BEFORE,
    }


def numpy_version() -> tuple[int, ...]:
    """Return the first two numbers of NumPy's version without importing NumPy."""
    from importlib.metadata import version  # slow to import and rarely needed

    return tuple(int(part) for part in version("numpy").split(".")[:2])


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Pin this process if its environment requests it and NumPy is not loaded, or was loaded pinned."""
    global active
    if environ.get(VARIABLE) != PORTABLE:
        return
    if "numpy" not in sys.modules or environ.items() >= pins().items():
        environ.update(pins())
        active = True


def requested(environ: MutableMapping[str, str] = os.environ) -> str:
    """Return the value of `--bits` in the environment; native if there is none."""
    return environ.get(VARIABLE) or NATIVE


def claim(bits: str) -> None:
    """Restart this program pinned, before MPI starts, if `bits` requires it and the environment does not."""
    if bits == PORTABLE and requested() != PORTABLE:
        sys.stdout.flush()
        environ = {**environment.as_started, VARIABLE: PORTABLE, **pins()}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def flag_of(arguments: Sequence[str]) -> str:
    """Return `--bits` of a command's arguments; native if it is missing or has no value."""
    import argparse  # slow to import; this module must load fast, since signals are not handled yet

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--bits", default=NATIVE)
    try:
        return str(parser.parse_known_args(arguments)[0].bits)
    except argparse.ArgumentError:
        return NATIVE


def unfit(machine: str, flags: str) -> str:
    """Return why a processor with these Linux CPU flags cannot give portable results; empty if it can."""
    if machine not in ("x86_64", "AMD64"):
        return f"it needs {LEVEL}, but this processor is {machine}, which is untested"
    missing = [name for name in MUST_HAVE if name not in flags.split()] if flags else []
    return f"it needs {LEVEL}, but this processor lacks {', '.join(missing)}" if missing else ""


def fault(blas: str, target: str) -> str:
    """Return why this BLAS and compile `target` do not give portable results; empty if they do."""
    if not active:
        return f"NumPy was imported before zero_mpi: set {VARIABLE}=portable before the program starts"
    reason = unfit(os.uname().machine, environment.of_processor("flags"))
    if reason:
        return reason
    if target != TARGET:
        return "it needs the compiled operations: pip install 'zero-mpi[fast]'"
    if not blas.startswith("openblas") or not blas.endswith(KERNELS):
        return f"it needs the OpenBLAS kernels {KERNELS}, but NumPy has {blas}"
    variables = [name for name, value in pins().items() if os.environ.get(name) != value]
    return f"{', '.join(variables)} changed since this program began" if variables else ""
