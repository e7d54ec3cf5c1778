"""The operations for `numpy.ndarray`, compiled: importing this package compiles or loads all kernels.

Inputs in float32 or bfloat16 are computed here; whatever else comes goes to the reference. A kernel runs on
one thread; its rows are shared out to as many as the rank has (`ops.threads`). Compiled code is kept in a
folder named after versions, processor and source (`ops.code_cache`); one rank of a node fills it before the
others look.

Results lie in recycled memory (`device.arrays`), so a step allocates nothing large after the first two.
Products call the OpenBLAS that NumPy has loaded, and add gradients straight into the flat buffer. Kernels
pass NaN and infinity on, so that a bad number is seen. AdamW is compiled without fast-math, so its bits do
not depend on where a buffer is cut into slices.
"""

from zero_mpi.ops.cpu import attention, dequantize, elementwise, embedding, flat, linear, loss, norm

MODULES = attention, dequantize, elementwise, embedding, flat, linear, loss, norm  # that define operations
# What is given float32 copies of bfloat16 (`low_precision`); the others compute with it themselves.
ON_COPIES = (loss.cross_entropy,)
