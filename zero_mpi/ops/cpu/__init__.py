"""Compiled operations for `numpy.ndarray`. A kernel is loaded when it is first called.

Kernels compute float32 and bfloat16, and the reference computes other types. A call of a kernel runs on one
thread; the rows of an input are divided among the rank's threads (`ops.threads`). `ops.code_cache` keeps
compiled code between runs. Results use recycled memory (`device.arrays`), so a step allocates no large array
after the first two steps. Matmuls add gradients directly to the flat buffer.
"""

from zero_mpi.ops.cpu import (  # noqa: F401
    attention,
    dequantize,
    elementwise,
    embedding,
    experts,
    flat,
    loss,
    norm,
    products,
)
