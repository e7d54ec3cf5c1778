"""Operations of layers and optimizers. The type of an operation's first array selects the version.

`reference` defines each operation with `registry.operation`, and `registry.implements` adds faster versions
for an array type. Callers write `ops.NAME(...)` for arrays on any device. If numba is installed, NumPy arrays
use the versions in `ops.cpu`, which `prepare` or the first operation loads, unless ZERO_MPI_OPS=reference or
NUMBA_DISABLE_JIT=1 is set. CuPy arrays use the versions in `ops.gpu`.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from zero_mpi import device, environment
from zero_mpi.ops import code_cache, low_precision, threads
from zero_mpi.ops.reference import *  # noqa: F403  (for type checkers)
from zero_mpi.ops.registry import OPERATIONS, register

globals().update(OPERATIONS)

_OBSTACLES = {  # reason why operations are not compiled -> whether this reason applies
    "ZERO_MPI_OPS=reference disables compiled operations": os.environ.get("ZERO_MPI_OPS") == "reference",
    "NUMBA_DISABLE_JIT keeps numba from compiling": os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"),
    "numba is not installed: pip install 'zero-mpi[fast,onednn]'": find_spec("numba") is None,
}
_compiles = not any(_OBSTACLES.values())
GENERATION = "generation"  # kernels that only generation needs


def backend() -> str:
    """Return the backend in use: "numba 0.68.1", "numpy" for the reference, or the libraries of a GPU."""
    if device.in_use().name == "cuda":
        from zero_mpi.ops import gpu

        return gpu.about()
    return f"numba {code_cache.package_version('numba')}" if _compiles else "numpy"


def compiles() -> bool:
    return _compiles


def products(kind: Any) -> tuple[str, str]:
    """Return (the host's matmul library for a type, ""), or ("", the reason why matmuls use float32 copies).

    The result is ("", "") on a GPU, for float64, and for float32 if BLAS computes the matmuls.
    """
    if device.in_use() is not device.HOST or kind == np.float64:  # NumPy computes float64 matmuls
        return "", ""
    if kind not in (np.float32, low_precision.BFLOAT16):
        return "", "no CPU kernel multiplies float16"
    library, reason = None, next((text for text, applies in _OBSTACLES.items() if applies), "")
    if _compiles:
        from zero_mpi.ops.cpu import onednn

        library, reason = onednn.load()
    return library.about if library else "", "" if kind == np.float32 else reason


def slower(kind: Any) -> str:
    """Return the reason why a type is slow on this machine, or an empty string."""
    if device.in_use().name == "cuda":
        from zero_mpi.ops import gpu

        return gpu.attention.slower(kind)
    reason = products(kind)[1]
    return reason and f"slower than fp32 here, because matmuls run in float32: {reason}"


def compiled_for() -> str:
    """Return the CPU that the operations are compiled for, or an empty string for the reference or a GPU."""
    if not _compiles or device.in_use().name == "cuda":
        return ""
    from zero_mpi.ops.cpu import jit

    return jit.target()


@cache
def prepare_gpu() -> None:
    """Compile the kernels of the GPU in use, or load them from CuPy's cache."""
    from zero_mpi.ops import gpu

    register(gpu.launch.ARRAY)
    gpu.prepare()


def prepare(say: Callable[[str], object] | None = None, kind: Any = np.float32) -> None:
    """Compile all kernels of a type for the device in use, unless the cache has them. Call it once.

    Before it compiles for a CPU, which takes about ten seconds, it calls `say` with one line. If many ranks
    start together, call `prepare` first on one rank of each node, which fills the cache for the other ranks.
    Other kernels, such as the host's kernels in a GPU run, are compiled when they are first called.
    """
    if device.in_use().name == "cuda":
        prepare_gpu()
    elif _compiles:
        prepare_cpu()
        for name in ("float32", "bfloat16") if kind == low_precision.BFLOAT16 else ("float32",):
            fill_cache(name, say)


def fill_cache(kind: str, say: Callable[[str], object] | None = None) -> None:
    """Compile the kernels of a type, or the kernels that only generation needs, unless the cache has them."""
    if code_cache.is_complete(kind):
        return
    if say is not None:
        suffix = f" of {kind}" if kind == GENERATION else ""
        say(f"compiling kernels{suffix} for this CPU (once, cached in {code_cache.folder()})")
    from zero_mpi.ops.cpu import jit, products

    if kind == "bfloat16":
        products.load()
    if kind == GENERATION:
        from zero_mpi.ops.cpu import decode  # noqa: F401
    jit.compile_all(kind)
    code_cache.mark_complete(kind)


def use_threads(count: int | None = None) -> int:
    """Set and return the number of compute threads; default: the environment's number, or 1 if it sets none.

    The reference uses this many threads in NumPy's BLAS.
    """
    if count is None:
        count = threads.of_libraries() if environment.threads_were_set else 1
    threads.use(count if _compiles else 1)
    if not _compiles:
        threadpool_limits(count)
    return count


@cache
def prepare_cpu() -> None:
    from zero_mpi.ops import cpu  # noqa: F401

    register(np.ndarray)


def _on_first_use(operation: Any) -> Callable[..., Any]:
    """Return a placeholder for an operation; the placeholder imports the kernels when it is called."""

    def load_and_call(*arguments: Any, **keywords: Any) -> Any:
        prepare_cpu()
        return operation(*arguments, **keywords)

    return load_and_call


if _compiles:
    for _operation in OPERATIONS.values():
        _operation.register(np.ndarray, _on_first_use(_operation))
