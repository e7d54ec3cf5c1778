"""Tests of batched matrix products on AMX tile units; skipped on other processors."""

import itertools

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")
from zero_mpi.ops.cpu import onednn, products

LIBRARY, WHY = onednn.load()
MULTIPLY = products.by_tiles() if LIBRARY is not None and LIBRARY.has_tiles else None
pytestmark = pytest.mark.skipif(MULTIPLY is None, reason=WHY or "this processor has no tile units (AMX)")
BF = np.dtype(ml_dtypes.bfloat16)
# (rows, depth, columns): full tiles, parts of tiles, slightly more than full tiles
SIZES = [(128, 64, 256), (1, 1, 1), (5, 3, 7), (33, 31, 65)]
SIZES += [(64, 96, 16), (17, 130, 48), (40, 64, 64), (31, 32, 32)]


def matrices(rows, columns, by_columns, seed):
    shape = (2, 3, columns, rows) if by_columns else (2, 3, rows, columns)
    buffer = np.random.default_rng(seed).standard_normal((*shape[:3], shape[3] + 5), np.float32).astype(BF)
    x = buffer[..., 2 : 2 + shape[3]]
    return x.swapaxes(2, 3) if by_columns else x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("a_turned", "b_turned"), [*itertools.product([False, True], repeat=2)])
def test_a_product_is_that_of_float32(size, a_turned, b_turned):
    rows, depth, columns = size
    a, b = matrices(rows, depth, a_turned, 1), matrices(depth, columns, b_turned, 2)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    near = 1e-6 * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))
    c = np.full(exact.shape, 7, np.float32)
    assert MULTIPLY(a, b, c) is c
    assert (np.abs(c - exact) <= near).all()
    MULTIPLY(a, b, c, adds=True)
    assert (np.abs(c - 2 * exact) <= 4 * near).all()
    buffer = np.full((2, rows, 3, columns + 4), 5, BF)
    low = buffer[..., 2:-2].transpose(0, 2, 1, 3)
    MULTIPLY(a, b, low)
    assert (np.abs(low.astype(np.float64) - exact) <= near + 2.0**-8 * np.abs(exact)).all()
    assert (buffer[..., :2] == 5).all(), "nothing else is written"
    assert (buffer[..., -2:] == 5).all()
    MULTIPLY(a, b, low, adds=True)
    assert (np.abs(low.astype(np.float64) - 2 * exact) <= 2 * near + 2.0**-6 * np.abs(exact)).all()


def test_a_matrix_has_the_same_bits_wherever_it_lies_and_whatever_lies_beside():
    """A product does not depend on its address or on neighbouring memory, not even on NaN beside its rows."""
    a, b = matrices(40, 24, False, 3), matrices(24, 50, True, 4)
    full = MULTIPLY(a, b, np.empty((2, 3, 40, 50), np.float32))
    for x, y in itertools.product(range(2), range(3)):
        others = np.full((1, 1, 40, 27), np.nan, BF)
        others[..., 1:25] = a[x, y]
        single = MULTIPLY(others[..., 1:25], b[x : x + 1, y : y + 1], np.empty((1, 1, 40, 50), np.float32))
        assert single.tobytes() == full[x, y].tobytes()


def test_what_is_not_finite_stays_so():
    a, b = matrices(32, 32, False, 5).copy(), matrices(32, 32, False, 6)
    a[0, 0, 3, 4], a[1, 2, 5, 6] = np.nan, np.inf
    for kind in (np.float32, BF):
        c = MULTIPLY(a, b, np.empty(a.shape, kind)).astype(np.float32)
        mask = ~np.isfinite(c).all(axis=3)
        assert np.argwhere(mask).tolist() == [[0, 0, 3], [1, 2, 5]]
