"""Every operation matches its definition, written here as loops.

test_layers.py compares most backward operations with difference quotients. Shapes are small and odd; numbers
are float64. A test names its operations with `shows`; an operation without a test fails the suite.
"""

import cmath
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest

from zero_mpi import ops
from zero_mpi.ops import reference
from zero_mpi.ops.flat_reference import ADAMW_BLOCK
from zero_mpi.ops.registry import OPERATIONS

STEP = 1e-5  # step of the difference quotients
# Names of operations that have a test; first the backward operations that only test_layers.py tests.
SHOWN = {"linear_backward_x", "linear_backward_w", "linear_backward_b", "route_backward"}
SHOWN |= {"rms_norm_backward", "layer_norm_backward", "gelu_backward", "swiglu_backward"}
SHOWN |= {"geglu_backward", "weighted_swiglu_backward"}


def shows(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    SHOWN.update(names)
    return lambda test: test


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


@contextlib.contextmanager
def unchanged(*arrays: np.ndarray) -> Iterator[None]:
    before = [array.tobytes() for array in arrays]
    yield
    assert [array.tobytes() for array in arrays] == before, "an input was written"


def check_slope(f: Callable[..., float], inputs: list[np.ndarray], gradients: list[np.ndarray]) -> None:
    ways = [numbers(*array.shape, seed=number + 1) for number, array in enumerate(inputs)]

    def at(t: float) -> float:
        return f(*(array + t * way for array, way in zip(inputs, ways, strict=True)))

    near, far = at(STEP) - at(-STEP), at(2 * STEP) - at(-2 * STEP)
    terms = [np.vdot(gradient, way) for gradient, way in zip(gradients, ways, strict=True)]
    bound = 1e-8 * sum(map(abs, terms))
    assert sum(terms) == pytest.approx((8 * near - far) / (12 * STEP), rel=1e-8, abs=bound)


def close(actual: np.ndarray, expected: object, atol: float = 1e-13) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=atol)


def test_every_operation_has_a_test():
    assert not OPERATIONS.keys() - SHOWN, f"show {', '.join(sorted(OPERATIONS.keys() - SHOWN))} in a test"


@shows("dequantize")
def test_a_block_is_a_scale_and_what_it_scales():
    """A block of Q8_0 is a float16 scale and 32 one-byte integers. test_dequantize tests the other types."""
    blocks = np.zeros(5, [("scale", "<f2"), ("whole", "i1", 32)])
    blocks["scale"], blocks["whole"] = numbers(5), (40 * numbers(5, 32)).astype("i1")
    raw, values = blocks.view(np.uint8), np.zeros(5 * 32, np.float32)
    with unchanged(raw):
        ops.dequantize(raw, "Q8_0", values)
    for block, place in np.ndindex(5, 32):
        expected = float(blocks["scale"][block]) * int(blocks["whole"][block, place])
        assert values[32 * block + place] == expected  # exact in float32: a product of 11 and 7 bits


@shows("add")
def test_sums():
    x, y = numbers(3, 7), numbers(3, 7, seed=1)
    with unchanged(x, y):
        total = ops.add(x, y)
    assert np.array_equal(total, x + y)


@shows("scale")
def test_multiples():
    x, y = numbers(3, 7), numbers(3, 7, seed=1)
    with unchanged(x, y):
        multiple, total = ops.scale(x, 0.3), ops.scale(x, 0.3, y)
    assert np.array_equal(multiple, [[0.3 * value for value in row] for row in x])
    close(total, multiple + y)
    assert ops.scale(x.astype(np.float32), 0.3, y.astype(np.float32)).dtype == np.float32


@shows("linear")
@pytest.mark.parametrize("lead", [(5,), (2, 3), (1, 1, 1)])
def test_linear_is_a_product_with_each_row(lead):
    x, w, b = numbers(*lead, 7), numbers(3, 7, seed=1), numbers(3)
    with unchanged(x, w, b):
        plain, shifted = ops.linear(x, w), ops.linear(x, w, b)
    for place in np.ndindex(*lead):
        for o in range(3):
            expected = math.fsum(x[place][c] * w[o, c] for c in range(7))
            assert plain[place][o] == pytest.approx(expected, rel=1e-12, abs=1e-13)
            assert shifted[place][o] == pytest.approx(expected + b[o], rel=1e-12, abs=1e-13)


@shows("embedding")
def test_embedding_picks_rows():
    w, tokens = numbers(4, 7), np.array([[3, 0, 3], [1, 1, 2]])
    y = ops.embedding(tokens, w)
    assert all(np.array_equal(y[place], w[tokens[place]]) for place in np.ndindex(2, 3))
    y[...] = 0
    assert np.all(w != 0), "y must be a copy"


@shows("embedding_backward")
@pytest.mark.parametrize("kind", [np.int64, np.uint16])
def test_embedding_backward_adds_a_row_for_every_place_of_a_token(kind):
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, size=(3, 17)).astype(kind)  # ids 0 to 4 of 7, repeatedly
    dy, dw = numbers(3, 17, 7), numbers(7, 7)
    expected = dw.copy()
    np.add.at(expected, tokens, dy)
    with unchanged(tokens, dy):
        ops.embedding_backward(tokens, dy, dw)
    close(dw, expected)
    assert np.array_equal(dw[5:], numbers(7, 7)[5:]), "rows of other tokens must not change"


@shows("positions", "positions_backward")
def test_positions_are_added_to_every_sequence():
    x, w, dy, dw = numbers(2, 5, 7), numbers(5, 7), numbers(2, 5, 7, seed=1), numbers(5, 7, seed=1)
    expected = dw.copy()
    for b, t in np.ndindex(2, 5):
        expected[t] += dy[b, t]
    with unchanged(x, w, dy):
        y = ops.positions(x, w)
        ops.positions_backward(dy, dw)
    assert all(np.array_equal(y[b, t], x[b, t] + w[t]) for b, t in np.ndindex(2, 5))
    close(dw, expected)


@shows("rms_norm")
def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x, w = 3 * numbers(2, 5, 7), numbers(7)
    with unchanged(x, w):
        y, r = ops.rms_norm(x, w, 0.1)
    assert r.shape == (2, 5, 1)
    for place in np.ndindex(2, 5):
        root = math.sqrt(math.fsum(value * value for value in x[place]) / 7 + 0.1)
        assert r[place][0] == pytest.approx(1 / root, rel=1e-12)
        close(y[place], [x[place][c] / root * w[c] for c in range(7)])


@shows("layer_norm")
def test_layer_norm_subtracts_the_mean_and_divides_by_the_deviation():
    x, w, b = 3 * numbers(2, 5, 7) + 2, numbers(7), numbers(7, seed=1)
    with unchanged(x, w, b):
        y, mean, r = ops.layer_norm(x, w, b, 0.1)
    for place in np.ndindex(2, 5):
        middle = math.fsum(x[place]) / 7
        root = math.sqrt(math.fsum((value - middle) ** 2 for value in x[place]) / 7 + 0.1)
        assert (mean[place][0], r[place][0]) == pytest.approx((middle, 1 / root), rel=1e-12)
        close(y[place], [(x[place][c] - middle) / root * w[c] + b[c] for c in range(7)])


@shows("gelu")
def test_gelu_is_the_tanh_form():
    x = np.array([-50.0, -3.0, -0.5, 0.0, 1e-9, 0.7, 2.0, 50.0])
    with unchanged(x):
        y = ops.gelu(x)
    close(y, [v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x])


@shows("swiglu")
def test_swiglu_is_gate_times_its_sigmoid_times_up():
    gate, up = 3 * numbers(5, 7), numbers(5, 7, seed=1)
    with unchanged(gate, up):
        y = ops.swiglu(gate, up)
    for place in np.ndindex(5, 7):
        expected = gate[place] / (1 + math.exp(-gate[place])) * up[place]
        assert y[place] == pytest.approx(expected, rel=1e-12)


@shows("swiglu")
def test_swiglu_does_not_overflow():
    gate = np.array([-1e4, 1e4], np.float32)
    assert np.array_equal(ops.swiglu(gate, np.ones(2, np.float32)), np.array([0, 1e4], np.float32))


@shows("geglu", "weighted_swiglu")
def test_other_gated_pairs_are_products():
    gate, up, w = 2 * numbers(3, 7), numbers(3, 7, seed=1), numbers(3, 1)
    with unchanged(gate, up, w):
        close(ops.geglu(gate, up), ops.gelu(gate) * up)
        close(ops.weighted_swiglu(gate, up, w), ops.swiglu(gate, up) * w)


@shows("linear_wide")
def test_a_wide_product_is_not_rounded():
    x, w, plus = (
        numbers(2, 3, 5).astype(ml_dtypes.bfloat16),
        numbers(4, 5).astype(ml_dtypes.bfloat16),
        numbers(2, 3, 4),
    )
    plus = plus.astype(np.float32)
    y = ops.linear_wide(x, w, plus)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, x.astype(float) @ w.astype(float).T + plus, rtol=1e-6, atol=1e-6)
    mixed = ops.linear_wide(x.astype(np.float32), w, plus)
    np.testing.assert_allclose(mixed, y, rtol=1e-6, atol=1e-6)


@shows("route")
@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("used", [1, 3, 5])
def test_the_largest_of_a_softmax_are_chosen_and_rows_sorted_by_expert(used, normalized, kind):
    """Ties go to the lowest index. One expert gets no row (if not all are used); another gets most rows."""
    logits = numbers(7, 5).astype(kind)
    logits[:, 2], logits[:, 4], logits[3] = 9, -9, 0.5
    with unchanged(logits):
        p, chosen, rows, tokens, weights, starts = ops.route(logits, used, normalized)
    exact = np.exp(logits.astype(float))
    exact /= exact.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(p, exact, rtol=1e-6)
    order = [sorted(range(5), key=lambda e: (-p[t, e], e))[:used] for t in range(7)]
    assert chosen.tolist() == order
    assert order[3] == list(range(used))
    expected = [(e, t, u) for e in range(5) for t in range(7) for u in range(used) if order[t][u] == e]
    assert rows.tolist() == [t * used + u for _, t, u in expected]
    assert tokens.tolist() == [t for _, t, _ in expected]
    assert starts.tolist() == [sum(e < expert for e, _, _ in expected) for expert in range(6)]
    assert starts[3] - starts[2] >= 6
    shares = [p[t, e] / (sum(p[t, i] for i in order[t]) if normalized else 1) for e, t, _ in expected]
    np.testing.assert_allclose(weights[:, 0], shares, rtol=1e-6)


@shows("route")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_router_that_is_not_finite_chooses_experts_that_exist(bad):
    logits = numbers(3, 5).astype(np.float32)
    logits[1, 3] = bad
    _, chosen, rows, _, weights, starts = ops.route(logits, 2, True)
    assert sorted(rows) == list(range(6))
    assert starts[-1] == 6
    assert ((chosen >= 0) & (chosen < 5)).all()
    assert np.isnan(weights[np.isin(rows, (2, 3))]).all()


@shows("grouped_linear", "grouped_linear_backward_x", "grouped_linear_backward_w")
def test_grouped_products_are_those_of_each_group():
    """An expert without rows has no gradient."""
    starts = np.array([0, 2, 2, 7])
    x, w, plus, dy = numbers(7, 5), numbers(3, 4, 5), numbers(7, 4), numbers(7, 4, seed=1)
    dw, into = np.ones((3, 4, 5)), np.ones((7, 5))
    with unchanged(x, w, plus, dy, starts):
        y, dx = ops.grouped_linear(x, w, starts, plus), ops.grouped_linear_backward_x(dy, w, starts)
        ops.grouped_linear_backward_w(dy, x, dw, starts)
        assert ops.grouped_linear_backward_x(dy, w, starts, into) is into
    of = [0, 0, 2, 2, 2, 2, 2]
    close(y, [w[e] @ x[i] + plus[i] for i, e in enumerate(of)])
    close(dx, [dy[i] @ w[e] for i, e in enumerate(of)])
    close(into, 1 + dx)
    close(dw, 1 + sum(np.eye(3)[e][:, None, None] * np.outer(dy[i], x[i]) for i, e in enumerate(of)))


@shows("rope")
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_as_complex_numbers(interleaved):
    x, angle = numbers(2, 5, 3, 6), 10 * numbers(5, 3)
    cos, sin = np.cos(angle), np.sin(angle)
    with unchanged(x, cos, sin):
        y = ops.rope(x, cos, sin, interleaved)
    for b, t, h, j in np.ndindex(2, 5, 3, 3):
        first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + 3)
        expected = complex(x[b, t, h, first], x[b, t, h, second]) * cmath.exp(1j * angle[t, j])
        actual = complex(y[b, t, h, first], y[b, t, h, second])
        assert cmath.isclose(actual, expected, rel_tol=1e-12)


SHAPES = [  # B, T queries, S keys, H heads, K key/value heads, widths D of keys and E of values
    (2, 5, 5, 6, 2, 3, 4),
    (1, 3, 7, 3, 3, 2, 2),  # more keys than queries; the queries are at the last positions
    (2, 1, 4, 5, 1, 3, 1),
    (1, 1, 1, 1, 1, 1, 1),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def attention_inputs(shape: tuple[int, ...]) -> list[np.ndarray]:
    b, t, s, h, kv, d, e = shape
    return [numbers(b, t, h, d), numbers(b, s, kv, d, seed=1), numbers(b, s, kv, e, seed=2)]


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    scores = [scale * math.fsum(q * key) for key in keys]
    weights = [math.exp(score - max(scores)) for score in scores]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / math.fsum(weights)


@shows("causal_attention")
@every_shape
def test_attention_is_a_softmax_per_head_and_position(shape):
    b, t, s, h, kv, _, e = shape
    q, k, v = attention_inputs(shape)
    with unchanged(q, k, v):
        y, weights = ops.causal_attention(q, k, v, 0.7)
    assert y.shape == (b, t, h, e)
    close(weights.sum(axis=-1), 1)
    for i, position, head in np.ndindex(b, t, h):
        seen, shared = s - t + position + 1, head // (h // kv)
        expected = attend(q[i, position, head], k[i, :seen, shared], v[i, :seen, shared], 0.7)
        close(y[i, position, head], expected)


@shows("causal_attention_backward")
@every_shape
def test_attention_backward_is_the_slope(shape):
    q, k, v = attention_inputs(shape)
    y, weights = ops.causal_attention(q, k, v, 0.7)
    dy = numbers(*y.shape, seed=3)
    with unchanged(q, k, v, weights, dy):
        gradients = ops.causal_attention_backward(dy, q, k, v, weights, 0.7)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    check_slope(
        lambda q, k, v: np.vdot(ops.causal_attention(q, k, v, 0.7)[0], dy), [q, k, v], list(gradients)
    )


@shows("causal_attention")
def test_attention_does_not_overflow():
    q = np.full((1, 4, 1, 2), 1e3, np.float32)
    k = np.array([1e3, -1e3, 1e3, -1e3], np.float32)[:, None] * np.ones(2, np.float32)
    y, _ = ops.causal_attention(q, k[None, :, None], numbers(1, 4, 1, 3).astype(np.float32), 1.0)
    v = numbers(1, 4, 1, 3).astype(np.float32)[0, :, 0]
    expected = [v[0], v[0], (v[0] + v[2]) / 2, (v[0] + v[2]) / 2]
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=1e-6)


@shows("cross_entropy")
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_cross_entropy_is_minus_log_softmax(lead):
    logits, targets = 3 * numbers(*lead, 7), np.random.default_rng(0).integers(7, size=lead)
    with unchanged(logits, targets):
        loss, dlogits = ops.cross_entropy(logits, targets, 0.3)
    expected = [
        math.log(math.fsum(map(math.exp, logits[place]))) - logits[place][targets[place]]
        for place in np.ndindex(*lead)
    ]
    assert loss == pytest.approx(0.3 * math.fsum(expected), rel=1e-12)
    assert dlogits.shape == logits.shape
    check_slope(lambda logits: ops.cross_entropy(logits, targets, 0.3)[0], [logits], [dlogits])


@shows("cross_entropy")
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_cross_entropy_does_not_overflow(kind):
    logits = np.array([[1e4, -1e4, 0], [-1e4, 1e4, 1e4]], kind)
    loss, dlogits = ops.cross_entropy(logits, np.array([1, 2]), 1.0)
    assert loss == pytest.approx(2e4 + math.log(2), rel=1e-6)
    assert dlogits.dtype == kind
    np.testing.assert_allclose(dlogits, [[1, -1, 0], [0, 0.5, -0.5]], atol=1e-6)


@shows("cross_entropy")
def test_the_loss_of_float32_logits_is_summed_in_float64():
    """The loss is computed in float64, since a float32 logarithm of 2 has an error of 1e-8."""
    loss, _ = ops.cross_entropy(np.zeros((999, 2), np.float32), np.zeros(999, np.int64), 1.0)
    assert loss.dtype == np.float64
    assert loss == pytest.approx(999 * math.log(2), rel=1e-13)


@shows("linear_cross_entropy")
@pytest.mark.parametrize("rows_of_a_chunk", [1, 2, 4, 6, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_cross_entropy_is_the_product_and_the_loss(monkeypatch, rows_of_a_chunk, bias):
    monkeypatch.setattr(reference, "LOGITS_BYTES", rows_of_a_chunk * 5 * 4)
    x, w, b = numbers(2, 3, 7), numbers(5, 7, seed=1), numbers(5) if bias else None
    targets = np.random.default_rng(0).integers(5, size=(2, 3))
    dw, db = numbers(5, 7, seed=2), numbers(5, seed=2)
    expected_loss, dlogits = ops.cross_entropy(ops.linear(x, w, b), targets, 0.3)
    expected_dw, expected_db = dw + dlogits.reshape(6, 5).T @ x.reshape(6, 7), db + dlogits.sum(axis=(0, 1))
    with unchanged(x, w, targets):
        loss, dx = ops.linear_cross_entropy(x, w, b, targets, 0.3, dw, db)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    close(dx, dlogits @ w)
    close(dw, expected_dw)
    close(db, expected_db)


@shows("linear_cross_entropy")
def test_linear_cross_entropy_leaves_out_what_is_not_wanted():
    x, w, targets = numbers(6, 7), numbers(5, 7, seed=1), np.arange(6) % 5
    loss, dx = ops.linear_cross_entropy(x, w, None, targets, 0.3, numbers(5, 7), numbers(5))
    loss_only, no_dx = ops.linear_cross_entropy(x, w, None, targets, 0.3, need_dx=False)
    frozen = ops.linear_cross_entropy(x, w, None, targets, 0.3)
    assert no_dx is None
    assert loss == loss_only == frozen[0]
    assert np.array_equal(frozen[1], dx)


SETTINGS = {"grad_scale": 0.3, "lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
SETTINGS |= {"decay": np.array([0.2]), "step": 3}


def flat_state(size: int, kind: type = np.float32) -> list[np.ndarray]:
    arrays = [numbers(size, seed=seed).astype(kind) for seed in range(4)]
    return [*arrays[:3], arrays[3] ** 2]


def adamw_by_formula(p, g, m, v):
    g = 0.3 * g
    m = 0.8 * m + (1 - 0.8) * g
    v = 0.95 * v + (1 - 0.95) * g * g
    m_hat, v_hat = m / (1 - 0.8**3), v / (1 - 0.95**3)
    return p - 0.01 * (m_hat / (v_hat**0.5 + 1e-3) + 0.2 * p), m, v


@shows("adamw")
def test_adamw_is_the_papers_update():
    p, g, m, v = flat_state(13, np.float64)
    expected = [adamw_by_formula(*element) for element in zip(p, g, m, v, strict=True)]
    with unchanged(g):
        ops.adamw(p, g, m, v, **SETTINGS)
    close(np.stack([p, m, v], axis=1), expected)


@shows("adamw")
@pytest.mark.parametrize(
    ("size", "cuts"),
    [
        (0, []),
        (13, [1, 2, 7]),
        (2 * ADAMW_BLOCK + 37, [1, 1023, 40001, ADAMW_BLOCK - 1, ADAMW_BLOCK + 1, 2 * ADAMW_BLOCK + 5]),
        (ADAMW_BLOCK, []),
        (ADAMW_BLOCK + 1, [ADAMW_BLOCK]),
    ],
)
def test_adamw_bits_do_not_depend_on_how_the_arrays_are_cut(size, cuts):
    full, pieces = flat_state(size), flat_state(size)
    ops.adamw(*full, **SETTINGS)
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        ops.adamw(*(array[start:stop] for array in pieces), **SETTINGS)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(full, pieces, strict=True))
    assert all(a.dtype == np.float32 for a in full)
    expected = adamw_by_formula(*(array.astype(np.float64) for array in flat_state(size)))
    for actual, exact in zip((full[0], *full[2:]), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=1e-6 * np.abs(exact).max(initial=0))


@shows("moving_average")
@pytest.mark.parametrize(
    ("size", "cuts"), [(13, [1, 2, 7]), (ADAMW_BLOCK + 37, [1023, ADAMW_BLOCK]), (0, [])]
)
def test_a_moving_average_is_its_formula_wherever_it_is_cut(size, cuts):
    e, p = (numbers(size, seed=seed).astype(np.float32) for seed in (1, 2))
    full, pieces = e.copy(), e.copy()
    with unchanged(p):
        ops.moving_average(full, p, 0.99)
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        ops.moving_average(pieces[start:stop], p[start:stop], 0.99)
    assert full.tobytes() == pieces.tobytes()
    expected = np.float32(0.99) * e + np.float32(1 - 0.99) * p
    assert full.tobytes() == expected.tobytes(), "a product or sum is not rounded once"


@shows("chunk_squares")
@pytest.mark.parametrize("chunk", [1, 3, 1024, 10007, ADAMW_BLOCK + 1])
def test_chunk_squares_are_sums_of_squares_in_float64(chunk):
    g = numbers(3 * chunk).astype(np.float32)
    with unchanged(g):
        sums = ops.chunk_squares(g, chunk)
    assert sums.dtype == np.float64
    runs = g.astype(np.float64).reshape(3, chunk)
    close(sums, [math.fsum(run * run) for run in runs])


@shows("chunk_squares")
@pytest.mark.parametrize(("chunk", "count"), [(1, 70001), (3, 25001), (97, 701), (1024, 150), (10007, 9)])
def test_chunk_squares_do_not_depend_on_how_the_array_is_cut(chunk, count):
    g = numbers(count * chunk).astype(np.float32)
    full = ops.chunk_squares(g, chunk)
    for cuts in ([1], [count // 2], [count - 1], [1, 2, count // 3, count - 2]):
        edges = [0, *cuts, count]
        parts = [g[a * chunk : b * chunk] for a, b in itertools.pairwise(edges)]
        # Copies have other addresses, like slices of other buffers.
        joined = np.concatenate([ops.chunk_squares(part.copy(), chunk) for part in parts])
        assert joined.tobytes() == full.tobytes()
