"""Compiled operations for `numpy.ndarray`. A kernel is loaded when it is first called.

Kernels compute float32 and bfloat16, and the reference computes other types. A call of a kernel runs on one
thread; the rows of an input are divided among the rank's threads (`ops.threads`). Compiled code is kept in a
folder named after versions, processor and source (`ops.code_cache`). One rank of a node fills the folder
before the other ranks read it.

Results use recycled memory (`device.arrays`), so a step allocates no large array after the first two steps.
Matmuls call the OpenBLAS that NumPy has loaded, and they add gradients directly to the flat buffer. Kernels
propagate NaN and infinity, so that training notices them. AdamW is compiled without fast-math, so its
results are bit-identical wherever a buffer is cut into slices.
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
