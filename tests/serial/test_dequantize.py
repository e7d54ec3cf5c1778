"""Kernels that decode GGUF blocks are bit-identical to the package gguf, for any bytes."""

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

from zero_mpi import ops
from zero_mpi.ops import reference
from zero_mpi.ops.block_kinds import BLOCK_KINDS

BLOCKS = 700  # blocks per type, enough for zeros, denormals, infinities and NaN among random scales


@pytest.mark.parametrize("low", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("operation", [ops.dequantize, reference.dequantize])
@pytest.mark.parametrize("kind", BLOCK_KINDS.values(), ids=lambda kind: kind.name)
def test_the_bits_are_those_of_gguf(kind, operation, low):
    raw = np.random.default_rng(len(kind.name)).integers(256, size=BLOCKS * kind.nbytes, dtype=np.uint8)
    raw[: kind.nbytes], raw[kind.nbytes : 2 * kind.nbytes] = 0, 255
    actual, width = np.zeros(BLOCKS * kind.elements, low), f"u{np.dtype(low).itemsize}"
    operation(raw, kind.name, actual)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, GGMLQuantizationType[kind.name]).astype(low)
        unknown = np.isnan(actual) & np.isnan(expected)
    assert ((actual.view(width) == expected.view(width)) | unknown).all()
    assert np.isfinite(actual.astype(np.float32)).any()
