"""The operations for `numpy.ndarray`, compiled: importing this package compiles or loads all kernels.

Inputs in float32 are computed here; whatever else comes goes to the reference. Results lie in recycled
memory. A kernel runs on one thread, and BLAS on as many as the rank has.
"""

from zero_mpi.ops.cpu.attention import causal_attention, causal_attention_backward
from zero_mpi.ops.cpu.elementwise import (
    add,
    gelu,
    gelu_backward,
    rope,
    swiglu,
    swiglu_backward,
)
from zero_mpi.ops.cpu.embedding import embedding, embedding_backward, positions, positions_backward
from zero_mpi.ops.cpu.flat import adamw, chunk_squares
from zero_mpi.ops.cpu.linear import linear, linear_backward_b, linear_backward_w, linear_backward_x
from zero_mpi.ops.cpu.loss import cross_entropy, linear_cross_entropy
from zero_mpi.ops.cpu.norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward

OPERATIONS = (
    add,
    adamw,
    causal_attention,
    causal_attention_backward,
    chunk_squares,
    cross_entropy,
    embedding,
    embedding_backward,
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
    swiglu,
    swiglu_backward,
)
