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

from zero_mpi.ops.cpu.attention import causal_attention, causal_attention_backward
from zero_mpi.ops.cpu.dequantize import dequantize
from zero_mpi.ops.cpu.elementwise import (
    add,
    geglu,
    geglu_backward,
    gelu,
    gelu_backward,
    rope,
    scale,
    swiglu,
    swiglu_backward,
)
from zero_mpi.ops.cpu.embedding import embedding, embedding_backward, positions, positions_backward
from zero_mpi.ops.cpu.flat import adamw, chunk_squares, moving_average
from zero_mpi.ops.cpu.linear import linear, linear_backward_b, linear_backward_w, linear_backward_x
from zero_mpi.ops.cpu.loss import cross_entropy, linear_cross_entropy
from zero_mpi.ops.cpu.norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward

OPERATIONS = (
    add,
    adamw,
    moving_average,
    causal_attention,
    causal_attention_backward,
    chunk_squares,
    cross_entropy,
    dequantize,
    embedding,
    embedding_backward,
    geglu,
    geglu_backward,
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward_b,
    linear_backward_w,
    linear_backward_x,
    linear_cross_entropy,
    positions,
    positions_backward,
    rms_norm,
    rms_norm_backward,
    rope,
    scale,
    swiglu,
    swiglu_backward,
)
# What is given float32 copies of bfloat16 (`low_precision`); the others compute with it themselves.
ON_COPIES = (cross_entropy,)
