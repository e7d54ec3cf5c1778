"""The operations for `cupy.ndarray`, in float32, bfloat16 and float16: own kernels, cuBLASLt, cuDNN.

`ops.low_precision` defines them: numbers are widened to float32, results rounded once; statistics and losses
are never low, and a gradient that is added to keeps its own type. Two runs give the same bits. Results are in
the GPU's recycled memory and are ordered by its stream; no function here waits. Importing this package needs
CuPy but no GPU.

Matrix products are cuBLASLt's (`gemm`): bias, shortcut and the gradient so far are added inside the product.
Attention is cuDNN's for low types where its memory stays within a bound (`sdpa`), otherwise products around a
softmax kernel (`attention`). The rest is CUDA C++ in `kernels/`, compiled by CuPy's NVRTC; `launch` holds the
table of kernels and their parameters. There are no atomics. Sums over rows go through lines of partial sums
whose number depends on the shape alone; gradients of embeddings go through a stable sort of (token, place).

Tests need no GPU: `tests/pretend` is a CuPy whose streams are threads that run late, whose kernels are the
real sources compiled for the processor, and whose cuBLASLt and cuDNN are NumPy behind the same calls. It
cannot show speed or what real drivers do; `benchmarks/gpu_check.py` looks at that in one call. The suite also
compiles every kernel for sm_80, sm_90 and sm_100.
"""

from zero_mpi.ops.gpu import attention, elementwise, embedding, flat, gemm, launch, linear, loss, norm  # noqa: F401  (register versions)


def about() -> str:
    """Return the libraries of products and attention, for messages and records: others may give other bits.

    Raise UsageError if a library is missing or a setting cannot be met.
    """
    return f"{gemm.about()}; {attention.about()}"


def prepare() -> None:
    """Compile all kernels for the GPU in use, or load them from CuPy's cache; UsageError as in `about`."""
    about()
    for kernel in launch.TABLE.values():
        kernel.bind()
