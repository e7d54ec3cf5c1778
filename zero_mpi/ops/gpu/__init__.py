"""Operations for `cupy.ndarray`, in float32, bfloat16 and float16, by our kernels, cuBLASLt and cuDNN.

As in `ops.low_precision`, computation is in float32, and each result is rounded once, with exceptions in
`linear`; statistics and losses are float32 or wider. By default two runs are bit-identical. Results are in
the GPU's recycled memory. The stream orders all calls. Importing the package needs CuPy but no GPU.

cuBLASLt computes matrix products (`gemm`), and adds bias, shortcut and the earlier gradient inside the
product. cuDNN computes bf16 and fp16 attention in the cases that `sdpa` describes; all other attention
uses products and softmax kernels (`attention`). Other operations are CUDA C++ in `kernels/`,
compiled by CuPy's NVRTC; `launch` has the table of kernels. No kernel uses atomics. Sums over rows use
partial sums whose number depends only on the shape. Gradients of embeddings use a stable sort by token.

Tests need no GPU: `tests/pretend` simulates CuPy. `benchmarks/gpu_check.py` tests speed and real drivers.
"""

from zero_mpi.ops.gpu import attention, elementwise, embedding, flat, gemm, launch, linear, loss, norm  # noqa: F401  (register versions)


def about() -> str:
    """Return a description of the product and attention libraries, on which results depend.

    Raise UsageError if a required library is missing or a setting is invalid or cannot be met.
    """
    return f"{gemm.about()}; {attention.about()}"


def prepare() -> None:
    """Compile all kernels for the GPU in use, or load them from CuPy's cache; raise like `about`."""
    about()
    for kernel in launch.TABLE.values():
        kernel.bind()
