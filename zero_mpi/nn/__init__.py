"""Layers. A layer has parameter names, a forward and a backward, but holds no arrays."""

from zero_mpi.nn.activation import GELU, GeGLU, JointSwiGLU, Multiply, SwiGLU
from zero_mpi.nn.attention import (
    CausalAttention,
    FusedQKV,
    Heads,
    JointQKNorm,
    JointQKV,
    MergeHeads,
    ProjectQKV,
    QKNorm,
    RoPE,
)
from zero_mpi.nn.batch import Packed, batch_of
from zero_mpi.nn.compose import Chain, Recompute, Residual
from zero_mpi.nn.embedding import Embedding, LearnedPositions
from zero_mpi.nn.experts import Experts
from zero_mpi.nn.layer import Cache, Layer, Param, Stage, Tally, stage_params
from zero_mpi.nn.linear import Linear
from zero_mpi.nn.loss import CrossEntropy, cross_entropy
from zero_mpi.nn.norm import LayerNorm, RMSNorm

__all__ = [
    "GELU",
    "Cache",
    "CausalAttention",
    "Chain",
    "CrossEntropy",
    "Embedding",
    "Experts",
    "FusedQKV",
    "GeGLU",
    "Heads",
    "JointQKNorm",
    "JointQKV",
    "JointSwiGLU",
    "Layer",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "MergeHeads",
    "Multiply",
    "Packed",
    "Param",
    "ProjectQKV",
    "QKNorm",
    "RMSNorm",
    "Recompute",
    "Residual",
    "RoPE",
    "Stage",
    "SwiGLU",
    "Tally",
    "batch_of",
    "cross_entropy",
    "stage_params",
]
