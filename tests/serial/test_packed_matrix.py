"""Products with matrices in GGUF blocks equal products with the unpacked matrices."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

from zero_mpi.ops.block_kinds import BLOCK_KINDS, PACKED, SCALES, finite_blocks
from zero_mpi.ops.packed_matrix import FEW, PackedMatrix

ROWS, BLOCKS = 70, 3


def some_matrix(name):
    kind = BLOCK_KINDS[name]
    raw = np.random.default_rng(len(name)).integers(256, size=(ROWS, BLOCKS, kind.nbytes), dtype=np.uint8)
    for low in SCALES[name]:
        raw[..., low + 1] &= 0x3B  # makes the scale a float16 below 1
    raw = raw.reshape(ROWS, -1)
    return PackedMatrix(raw, name), dequantize(raw, GGMLQuantizationType[name])


@pytest.mark.parametrize("rows", [1, 2, FEW + 1])
@pytest.mark.parametrize("name", PACKED)
def test_products_are_those_of_the_values(name, rows):
    matrix, values = some_matrix(name)
    assert matrix.shape == values.shape
    draw = np.random.default_rng(1)
    x, b = (
        draw.standard_normal((1, rows, values.shape[1]), np.float32),
        draw.standard_normal(ROWS, np.float32),
    )
    plus = draw.standard_normal((1, rows, ROWS), np.float32)
    expected = x.astype(np.float64) @ values.T.astype(np.float64) + b + plus
    assert np.abs(matrix.linear(x, b, plus) - expected).max() <= 1e-6 * np.abs(expected).max()
    part = slice(8, 40)
    assert np.array_equal(matrix[part].linear(x), matrix.linear(x)[..., part])


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_rows_have_the_bits_of_the_values(name):
    matrix, values = some_matrix(name)
    places = np.array([[3, 0, 3], [69, 1, 2]])
    assert np.array_equal(matrix.rows(places), values[places])


@pytest.mark.parametrize("scale", [np.inf, np.nan])
@pytest.mark.parametrize("name", PACKED)
def test_scales_tell_values_that_are_not_finite(name, scale):
    matrix, values = some_matrix(name)
    assert finite_blocks(matrix.raw.reshape(-1), name).all()
    assert np.isfinite(values).all()
    place = BLOCK_KINDS[name].nbytes + SCALES[name][-1]  # position of a scale in the second block of a row
    matrix.raw[5, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    assert not finite_blocks(matrix.raw.reshape(-1), name).all()
    with np.errstate(all="ignore"):
        assert not np.isfinite(dequantize(matrix.raw, GGMLQuantizationType[name])).all()
