"""Every kernel of ops.gpu matches the reference in float32, bfloat16 and float16.

The expected result is computed on the host by the definition, `ops.reference`, in float64 from the same bits
and rounded once, as `ops.low_precision` defines. Shapes include odd cases: one element, primes, rows longer
and shorter than a block, tiles, and arrays with any offset or gaps. NaN around the arrays must not change.
"""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from test_flat import BF16, F16, F32, KINDS, every_kind

from zero_mpi import device, ops
from zero_mpi.device.arrays import pool_of
from zero_mpi.ops import OPERATIONS, low_precision, reference

pytestmark = pytest.mark.world(1)  # a single process

ULP = {F32: 2.0**-23, BF16: 2.0**-7, F16: 2.0**-10}
every_pair = pytest.mark.parametrize(
    ("kind", "other"), [(a, b) for a in KINDS for b in KINDS], ids=lambda kind: str(kind)
)
Case = tuple[list[Any], dict[str, Any]]


def numbers(
    *shape: int, seed: int = 0, kind: Any = F32, scale: float = 1.0, shift: float = 0.0
) -> np.ndarray:
    normals = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (normals * scale + shift).astype(np.float32).astype(kind)


def ids(count: int, *shape: int, kind: Any = np.int64) -> np.ndarray:
    return np.random.default_rng([count, *shape]).integers(count, size=shape).astype(kind)


def expected(name: str, args: list[Any], named: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the definition's float64 result, rounded by `ops.low_precision`, and the new arguments."""
    floats = [isinstance(x, np.ndarray) and x.dtype in KINDS for x in args]
    wide = [x.astype(np.float64) if is_float else x for x, is_float in zip(args, floats, strict=True)]
    result = getattr(reference, name)(*wide, **named)
    kind = next(x.dtype for x, is_float in zip(args, floats, strict=True) if is_float)
    after = [
        x.astype(old.dtype) if is_float else x for x, old, is_float in zip(wide, args, floats, strict=True)
    ]
    if not isinstance(result, tuple):
        return low_precision.narrowed(result, kind), after
    kinds = [entry.kind if entry.axes else "loss" for entry in OPERATIONS[name].signature.results]
    rest = (x if np.ndim(x) == 0 else x.astype(np.float32) for x in result)
    both = zip(rest, kinds, strict=True)
    return tuple(low_precision.narrowed(x, kind) if rule == "same" else x for x, rule in both), after


GUARD = 67  # elements before and after an array


def plain(x: np.ndarray) -> tuple[Any, Any]:
    """Return the array on the device, and None because no buffer surrounds it."""
    return device.in_use().from_host(x), None


def surrounded(x: np.ndarray, first: int = GUARD) -> tuple[Any, Any]:
    """Place the array at any address, surrounded by NaN, or by -1 for integers."""
    block = np.full(x.size + 2 * GUARD, np.nan if x.dtype.kind not in "iu" else -1).astype(x.dtype)
    block[first : first + x.size] = x.ravel()
    buffer = device.in_use().from_host(block)
    return buffer[first : first + x.size].reshape(x.shape), buffer


def aligned(x: np.ndarray) -> tuple[Any, Any]:
    return surrounded(x, 64)


def columns(x: np.ndarray) -> tuple[Any, Any]:
    """Place the array in columns of a wider array, so that only its rows are contiguous."""
    block = np.full((*x.shape[:-1], x.shape[-1] + 5), np.nan if x.dtype.kind not in "iu" else -1).astype(
        x.dtype
    )
    block[..., 3:-2] = x
    buffer = device.in_use().from_host(block)
    return buffer[..., 3:-2], buffer


LAYOUTS = [plain, aligned, surrounded, columns]


def bits(x: Any) -> bytes:
    return device.in_use().to_host(x).tobytes()


def close(actual: Any, truth: Any, kind: Any, ulps: float = 1.0) -> None:
    """Check equality up to rounding, as the summation order differs; in float32 relative to the maximum."""
    if isinstance(truth, tuple):
        assert len(actual) == len(truth)
        for a, b in zip(actual, truth, strict=True):
            close(a, b, kind, ulps)
        return
    if truth is None:
        assert actual is None
        return
    actual, truth = device.in_use().to_host(actual), np.asarray(truth)
    assert actual.shape == truth.shape
    assert actual.dtype == truth.dtype
    a, b = actual.astype(np.float64), truth.astype(np.float64)
    largest = max(0.05, np.abs(b).max(initial=0))
    if truth.dtype in (BF16, F16):
        tolerance = ulps * ULP[truth.dtype]
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=2e-6 * largest)
        assert np.mean(actual == truth) > 0.95 or actual.size < 100, "rounded more than once?"
    elif truth.dtype == F32:
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * largest)
    else:
        np.testing.assert_allclose(a, b, rtol=1e-6 if kind == F32 else 1e-5)


def norm_cases(shape: tuple[int, ...], kind: Any) -> dict[str, Case]:
    width = shape[-1:]
    x, dy, plus = (
        numbers(*shape, kind=kind, scale=3, shift=1),
        *(numbers(*shape, seed=s, kind=kind) for s in (1, 2)),
    )
    w, b, dw, db = (numbers(*width, seed=s, kind=kind) for s in (3, 4, 5, 6))
    (_, r), _ = expected("rms_norm", [x, w, 1e-3], {})
    (_, mean, root), _ = expected("layer_norm", [x, w, b, 1e-3], {})
    return {
        "rms_norm": ([x, w, 1e-3], {}),
        "layer_norm": ([x, w, b, 1e-3], {}),
        "rms_norm_backward": ([dy, x, w, r, dw], {}),
        "rms_norm_backward plus": ([dy, x, w, r, dw, plus], {}),
        "rms_norm_backward frozen": ([dy, x, w, r, None, plus], {}),
        "layer_norm_backward": ([dy, x, w, mean, root, dw, db], {}),
        "layer_norm_backward plus": ([dy, x, w, mean, root, dw, db, plus], {}),
        "layer_norm_backward frozen": ([dy, x, w, mean, root, None, db, plus], {}),
    }


def pointwise_cases(shape: tuple[int, ...], kind: Any) -> dict[str, Case]:
    x, y, z = (numbers(*shape, seed=s, kind=kind, scale=scale) for s, scale in ((0, 4), (1, 1), (2, 1)))
    return {
        "add": ([x, y], {}),
        "scale": ([x, 0.3], {}),
        "scale plus": ([x, 0.3, y], {}),
        "gelu": ([x], {}),
        "gelu_backward": ([y, x], {}),
        "swiglu": ([x, y], {}),
        "swiglu_backward": ([z, x, y], {}),
        "geglu": ([x, y], {}),
        "geglu_backward": ([z, x, y], {}),
    }


def row_cases(shape: tuple[int, ...], kind: Any) -> dict[str, Case]:
    x, y = numbers(*shape, kind=kind, scale=3), numbers(*shape, seed=1, kind=kind)
    lead, width = shape[:-1], shape[-1]
    table, gradient = (numbers(7, width, seed=s, kind=kind) for s in (2, 3))
    cases: dict[str, Case] = {
        "cross_entropy": ([x, ids(width, *lead), 0.3], {}),
        "embedding": ([ids(7, *lead), table], {}),
        "embedding_backward": ([ids(7, *lead), y, gradient], {}),
    }
    if len(shape) == 3:
        w, dw = (numbers(*shape[1:], seed=s, kind=kind) for s in (4, 5))
        cases |= {"positions": ([x, w], {}), "positions_backward": ([y, dw], {})}
    return cases


def all_cases(shape: tuple[int, ...], kind: Any) -> dict[str, Case]:
    return norm_cases(shape, kind) | pointwise_cases(shape, kind) | row_cases(shape, kind)


SHAPES = [(1, 1), (3, 7), (5, 8), (2, 3, 64), (17, 131), (1, 2, 1030)]


def check(name: str, case: Case, layout: Callable[[np.ndarray], tuple[Any, Any]], kind: Any) -> Any:
    name, (args, named) = name.partition(" ")[0], case
    result, after = expected(name, args, named)
    outputs = [entry.name for entry in OPERATIONS[name].signature.entries if entry.written]
    vectors = {id(x) for x in args if isinstance(x, np.ndarray) and layout is columns and x.ndim == 1}
    arrays = [
        (aligned if id(x) in vectors or (in_place(name, x, args) and layout is columns) else layout)(x)
        if isinstance(x, np.ndarray)
        else (x, None)
        for x in args
    ]
    before = [None if block is None else bits(block) for _, block in arrays]
    actual = getattr(ops, name)(*(x for x, _ in arrays), **named)
    close(actual, result, kind)
    for (x, block), truth, original, raw in zip(arrays, after, args, before, strict=True):
        if not isinstance(original, np.ndarray):
            continue
        if not outputs or original.tobytes() == truth.tobytes():
            assert bits(x) == original.tobytes(), "an input was written"
            assert block is None or bits(block) == raw
        else:
            close(x, truth, kind)
            assert block is None or around(block, x) == around_bytes(raw, block, x), (
                "other memory was written"
            )
    return actual


def in_place(name: str, x: np.ndarray, args: list[Any]) -> bool:
    return name.endswith("_backward") and name.startswith(("embedding", "positions")) and x is args[-1]


def around(block: Any, x: Any) -> bytes:
    return around_bytes(bits(block), block, x)


def around_bytes(raw: bytes, block: Any, x: Any) -> bytes:
    start = x.data.ptr - block.data.ptr
    return raw[:start] + raw[start + x.nbytes :]


@every_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operations_are_what_the_reference_defines(gpu, shape, kind):
    for name, case in all_cases(shape, kind).items():
        check(name, case, plain, kind)


@every_kind
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 3, 37)], ids=str)
def test_arrays_may_lie_anywhere_and_nothing_beside_them_is_written(gpu, shape, layout, kind):
    for name, case in all_cases(shape, kind).items():
        check(name, case, layout, kind)


@every_kind
def test_results_end_where_they_end(gpu, monkeypatch, kind):
    buffers: list[tuple[Any, Any]] = []

    def take(shape: tuple[int, ...], dtype: Any) -> Any:
        buffers.append(surrounded(np.zeros(shape, dtype), 64 + len(buffers) % 2))
        return buffers[-1][0]

    for name in ("elementwise", "embedding", "loss", "norm", "sums"):
        monkeypatch.setattr(import_module(f"zero_mpi.ops.gpu.{name}"), "take", take)
    for shape in [(3, 5, 16), (2, 3, 37)]:
        for name, (args, named) in all_cases(shape, kind).items():
            buffers.clear()
            arrays = [device.in_use().from_host(x) if isinstance(x, np.ndarray) else x for x in args]
            getattr(ops, name.partition(" ")[0])(*arrays, **named)
            for x, block in buffers:
                fresh = np.full(block.size, np.nan if block.dtype.kind == "f" or block.dtype == BF16 else -1)
                fresh = fresh.astype(block.dtype).tobytes()
                assert around(block, x) == around_bytes(fresh, block, x), f"{name} wrote outside a result"


@every_kind
def test_twice_the_same_bits(gpu, monkeypatch, kind):
    def run() -> list[bytes]:
        content = []
        for name, (args, named) in all_cases((3, 5, 72), kind).items():
            arrays = [device.in_use().from_host(x) if isinstance(x, np.ndarray) else x for x in args]
            result = getattr(ops, name.partition(" ")[0])(*arrays, **named)
            results = result if isinstance(result, tuple) else (result,)
            content += [bits(x) for x in (*results, *arrays) if device.is_cupy(x)]
        return content

    first = run()
    monkeypatch.setenv("PRETEND_CUPY_SEED", "1000000")
    assert run() == first


@every_kind
def test_nan_and_infinity_stay_visible(gpu, kind):
    x = numbers(3, 40, kind=kind)
    x[1, 7] = np.nan
    w, b, dy = numbers(40, kind=kind), numbers(40, kind=kind), numbers(3, 40, seed=1, kind=kind)
    on_gpu, w, b, dy = (gpu.from_host(item) for item in (x, w, b, dy))
    y, r = ops.rms_norm(on_gpu, w, 1e-3)
    z, mean, root = ops.layer_norm(on_gpu, w, b, 1e-3)
    loss, dz = ops.cross_entropy(on_gpu, gpu.from_host(np.array([0, 1, 2])), 1.0)
    rows = [y, z, ops.rms_norm_backward(dy, on_gpu, w, r, None), dz]
    rows += [ops.layer_norm_backward(dy, on_gpu, w, mean, root, None, None)]
    for row in rows:
        values = gpu.to_host(row).astype(np.float32)
        assert np.isnan(values[1]).all()
        assert np.isfinite(values[[0, 2]]).all(), "other rows must not change"
    assert math.isnan(float(loss))
    assert np.isnan(gpu.to_host(ops.gelu(on_gpu)).astype(np.float32)[1, 7])
    x[1, 7] = np.inf
    assert math.isnan(float(ops.cross_entropy(gpu.from_host(x), gpu.from_host(np.array([0, 1, 2])), 1.0)[0]))


@every_kind
def test_activations_have_their_limits(gpu, kind):
    x = np.array([-3e4, -100.0, -0.0, 0.0, 100.0, 3e4], np.float32).astype(kind)
    on_gpu, ones = gpu.from_host(x), gpu.from_host(np.ones(6, np.float32).astype(kind))
    passed = np.array([0, 0, 0, 0, *x[4:].astype(np.float32)], np.float32)
    slopes = np.array([0, 0, 0.5, 0.5, 1, 1], np.float32)
    for actual, truth in [
        (ops.gelu(on_gpu), passed),
        (ops.swiglu(on_gpu, ones), passed),
        (ops.gelu_backward(ones, on_gpu), slopes),
        (ops.swiglu_backward(ones, on_gpu, ones)[0], slopes),
        (ops.swiglu_backward(ones, on_gpu, ones)[1], passed),
        (ops.geglu(on_gpu, ones), passed),
        (ops.geglu_backward(ones, on_gpu, ones)[0], slopes),
        (ops.geglu_backward(ones, on_gpu, ones)[1], passed),
    ]:
        np.testing.assert_array_equal(gpu.to_host(actual).astype(np.float32), truth)


@every_kind
def test_rows_wider_than_a_block_are_cut_into_tiles(gpu, kind):
    for name, case in norm_cases((3, 8195), kind).items():
        check(name, case, plain, kind)


@every_kind
def test_a_block_takes_many_rows_and_sums_them_in_their_order(gpu, monkeypatch, kind):
    from zero_mpi.ops import sizes
    from zero_mpi.ops.gpu import norm

    monkeypatch.setattr(norm, "NORM_LINES", 2)
    monkeypatch.setattr(sizes, "COLUMN_LINES", 2)
    norm.deal.cache_clear()
    for shape in [(61, 264), (2000, 3)]:
        for name, case in norm_cases(shape, kind).items():
            check(name, case, plain, kind)
    norm.deal.cache_clear()


@every_pair
def test_gradients_keep_their_own_type(gpu, kind, other):
    x, dy, w = (numbers(6, 19, seed=s, kind=kind) for s in range(3))
    w, dw, db = w[0], numbers(19, seed=7, kind=other), numbers(19, seed=8, kind=other)
    (_, mean, r), _ = expected("layer_norm", [x, w, w, 1e-3], {})
    places, rows = ids(4, 6), numbers(4, 19, seed=9, kind=other)
    for name, args in {
        "rms_norm_backward": [dy, x, w, r, dw],
        "layer_norm_backward": [dy, x, w, mean, r, dw, db],
        "embedding_backward": [places, dy, rows],
        "positions_backward": [dy.reshape(3, 2, 19), numbers(2, 19, seed=3, kind=other)],
        "linear_backward_b": [dy, db],
    }.items():
        check(name, (args, {}), plain, kind)


@every_kind
@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 97, 500])
def test_tokens_may_fill_many_runs(gpu, count, kind):
    """Sorted positions are cut into runs: some tokens lie inside one run, others span several runs."""
    for vocabulary in (1, 3, 90):
        tokens = ids(vocabulary, count, kind=np.uint16)
        tokens[count // 3 :: 2] = vocabulary - 1
        case = [tokens, numbers(count, 9, kind=kind), numbers(vocabulary + 1, 9, seed=1)]
        check("embedding_backward", (case, {}), plain, kind)


def test_tokens_outside_are_seen_and_write_nothing(gpu):
    tokens = np.array([0, 4, -1, 3, 1 << 40])
    w, dw, dy = numbers(4, 6), numbers(4, 6, seed=1), numbers(5, 6, seed=2)
    on_gpu, block = surrounded(dw)
    y = gpu.to_host(ops.embedding(gpu.from_host(tokens), gpu.from_host(w)))
    ops.embedding_backward(gpu.from_host(tokens), gpu.from_host(dy), on_gpu)
    assert np.isnan(y[[1, 2, 4]]).all()
    assert np.array_equal(y[[0, 3]], w[[0, 3]])
    dw[0] += dy[0]
    dw[3] += dy[3]
    assert np.array_equal(gpu.to_host(on_gpu), dw)
    assert np.isnan(gpu.to_host(block)[:GUARD]).all()
    loss, _ = ops.cross_entropy(gpu.from_host(dy), gpu.from_host(tokens), 1.0)
    assert math.isnan(float(loss))


@every_kind
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("part", [1, 0.5, 0.75], ids=str)  # fraction that is rotated
@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 3, 5, 6), (1, 4, 3, 64), (2, 2, 4, 40)], ids=str)
def test_rope_turns_columns_of_wider_arrays_where_they_lie(gpu, shape, part, interleaved, kind):
    b, t, heads, width = shape
    turned = 2 * int(part * width / 2)
    angles = 10 * numbers(2 * t, turned // 2)
    cos, sin = (turn(angles).astype(np.float32)[1 : t + 1] for turn in (np.cos, np.sin))
    table = [gpu.from_host(x) for x in (cos, sin)]
    for gap in (0, 3, 8):
        joined = numbers(b, t, heads * width + gap, kind=kind)
        x = joined[..., gap:].reshape(shape)
        truth = low_precision.accept_low("rope", reference.rope)(x, cos, sin, interleaved)
        on_gpu = gpu.from_host(joined)
        view = on_gpu[..., gap:].reshape(shape)
        fresh = ops.rope(view, *table, interleaved)
        close(fresh, truth, kind)
        assert bits(fresh[..., turned:]) == x[..., turned:].tobytes(), "unrotated elements changed"
        assert ops.rope(view, *table, interleaved, view) is view
        assert bits(view) == bits(fresh)
        assert bits(on_gpu[..., :gap]) == joined[..., :gap].tobytes(), "other columns were written"


def test_losses_are_summed_in_float64(gpu):
    loss, _ = ops.cross_entropy(
        gpu.from_host(np.zeros((999, 2), np.float32)), gpu.from_host(np.zeros(999, int)), 1.0
    )
    assert loss.dtype == np.float64
    assert loss.shape == ()
    assert float(loss) == pytest.approx(999 * math.log(2), rel=1e-13)


@every_kind
def test_cross_entropy_does_not_overflow(gpu, kind):
    logits = np.array([[3e4, -3e4, 0], [-3e4, 3e4, 3e4], [-np.inf, 0, 0]], np.float32).astype(kind)
    loss, dz = ops.cross_entropy(gpu.from_host(logits), gpu.from_host(np.array([1, 2, 1])), 1.0)
    wide = logits.astype(np.float64)
    assert float(loss) == pytest.approx(wide[0, 0] - wide[0, 1] + 2 * math.log(2), rel=1e-6)
    truth = [[1, -1, 0], [0, 0.5, -0.5], [0, -0.5, 0.5]]
    np.testing.assert_allclose(gpu.to_host(dz).astype(np.float32), truth, atol=1e-6)


def test_the_steady_state_allocates_nothing(gpu):
    def step() -> None:
        for name, (args, named) in cases.items():
            getattr(ops, name.partition(" ")[0])(*args, **named)
        gpu.synchronize()

    cases = {
        name: ([gpu.from_host(x) if isinstance(x, np.ndarray) else x for x in args], named)
        for name, (args, named) in all_cases((2, 64, 96), BF16).items()
    }
    step()
    before = pool_of(gpu).nbytes
    assert before > 0
    step()
    assert pool_of(gpu).nbytes == before
