"""Products of bfloat16 on CPUs by oneDNN match the definition, and the library is tested before use."""

import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from jobs import run_job
from test_command_bits import needs_mpiexec, write_text

pytest.importorskip("numba")
from zero_mpi import ops
from zero_mpi.ops import low_precision, reference
from zero_mpi.ops.cpu import onednn, products
from zero_mpi.ops.registry import definitions

BF = np.dtype(ml_dtypes.bfloat16)
LIBRARY, WHY = onednn.load()
needs_library = pytest.mark.skipif(LIBRARY is None, reason=WHY)
SHAPES = [(1, 1, 1, 1), (1, 7, 5, 3), (2, 33, 48, 80), (3, 64, 130, 65)]  # batch, positions, inputs, outputs


def drawn(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32).astype(BF)


def assert_near(actual, expected):
    assert actual.dtype == expected.dtype
    a, b = actual.astype(np.float32), expected.astype(np.float32)
    tolerance = 2.0**-7 if actual.dtype == BF else 2.0**-18
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-5)
    assert actual.dtype != BF or np.mean(a != b) < 0.01


@pytest.fixture
def by_library(monkeypatch):
    ops.prepare()
    monkeypatch.setattr(low_precision, "run_low", lambda *arguments: pytest.fail("it was widened"))


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_a_forward_is_what_is_defined(shape, by_library, monkeypatch):
    batch, length, inputs, outputs = shape
    x, w, b = drawn(batch, length, inputs), drawn(outputs, inputs), drawn(outputs)
    plus = drawn(*shape[:2], outputs)
    cases = [(x, w), (x, w, b), (x, w, None, plus), (x, w, b, plus), (x[:, ::-1], w, b, plus[::-1])]
    results = [ops.linear(*case) for case in cases]
    monkeypatch.undo()
    for ours, case in zip(results, cases, strict=True):
        assert_near(ours, definitions.linear(*case))


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [BF, np.float32])
def test_a_backward_is_what_is_defined(shape, kind, by_library, monkeypatch):
    batch, length, inputs, outputs = shape
    x, w, dy = drawn(batch, length, inputs), drawn(outputs, inputs), drawn(batch, length, outputs)

    def all_of(operations):
        into, dw, db = x.copy(), np.ones((outputs, inputs), kind), np.ones(outputs, kind)
        dx = operations.linear_backward_x(dy, w)
        assert operations.linear_backward_x(dy, w, into) is into
        operations.linear_backward_w(dy, x, dw)
        operations.linear_backward_b(dy, db)
        return dx, into, dw, db

    results = all_of(ops)
    monkeypatch.undo()
    for ours, theirs in zip(results, all_of(definitions), strict=True):
        assert_near(ours, theirs)


@needs_library
def test_a_product_that_the_library_has_not_is_computed_all_the_same(monkeypatch):
    x, w, dw = drawn(5, 9), drawn(4, 9), np.ones((4, 9), np.float32)

    def refuses(*arguments):
        raise onednn.OneDNNError("not implemented")

    monkeypatch.setattr(LIBRARY.of_thread, "products", {})
    monkeypatch.setattr(onednn.Product, "__init__", refuses)
    assert_near(ops.linear(x, w), definitions.linear(x, w))
    ops.linear_backward_w(ops.linear(x, w), x, dw)
    expected = np.ones((4, 9), np.float32)
    definitions.linear_backward_w(ops.linear(x, w), x, expected)
    assert_near(dw, expected)


@needs_library
@pytest.mark.parametrize("rows_at_once", [3, 1000])
@pytest.mark.parametrize("kind", [BF, np.float32])
def test_a_head_with_its_loss_is_what_is_defined(kind, rows_at_once, by_library, monkeypatch):
    """The tolerance is 2^-7 of the largest value (mean: 2^-9), as the logits' gradient is rounded first."""
    monkeypatch.setattr(reference, "LOGITS_BYTES", rows_at_once * 50 * 4)
    x, w, b, targets = drawn(2, 5, 24), drawn(50, 24), drawn(50), np.arange(10).reshape(2, 5) * 4
    dw = np.ones((50, 24), kind)
    loss, dx = ops.linear_cross_entropy(x, w, b, targets, 0.1, dw)
    loss_only, no_dx = ops.linear_cross_entropy(x, w, b, targets, 0.1, need_dx=False)
    monkeypatch.undo()
    expected = np.ones((50, 24), kind)
    expected_loss, slope = definitions.linear_cross_entropy(x, w, b, targets, 0.1, expected)
    assert loss == loss_only == pytest.approx(expected_loss, rel=1e-6)
    assert no_dx is None
    assert (dx.dtype, dw.dtype) == (BF, kind)
    for ours, theirs in ((dx, slope), (dw, expected)):
        a, b = ours.astype(np.float32), theirs.astype(np.float32)
        assert np.abs(a - b).max() <= 2.0**-7 * np.abs(b).max()
        assert np.abs(a - b).mean() <= 2.0**-9 * np.abs(b).max()


@needs_library
@pytest.mark.parametrize("kind", [BF, np.dtype(np.float32)])
def test_the_same_product_has_the_same_bits_wherever_it_lies(kind):
    """Results do not depend on addresses, which differ between ranks."""
    x, w = drawn(160, 264).astype(kind), drawn(100, 264).astype(kind)
    expected = ops.linear(x, w)
    buffer = np.zeros(x.size + 64, kind)
    for start in (1, 2, 31):
        moved = buffer[start : start + x.size].reshape(x.shape)
        moved[...] = x
        assert ops.linear(moved, w).tobytes() == expected.tobytes()


@needs_library
@pytest.mark.parametrize("rows", [128, 131])
def test_large_products_of_float32_are_as_defined(rows):
    x, w, dy = (drawn(*shape).astype(np.float32) for shape in ((rows, 200), (333, 200), (rows, 333)))
    b, plus, dw, into = drawn(333).astype(np.float32), dy * 2, w.copy(), x.copy()
    assert rows * 200 * 333 > products.LEAST
    ops.linear_backward_w(dy, x, dw)
    pairs = [
        (ops.linear(x, w, b, plus), reference.linear(x, w, b, plus)),
        (ops.linear_backward_x(dy, w), reference.linear_backward_x(dy, w)),
        (ops.linear_backward_x(dy, w, into), x + reference.linear_backward_x(dy, w)),
        (dw, w + dy.T @ x),
    ]
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


@needs_library
def test_products_of_many_shapes_do_not_pile_up(monkeypatch):
    """The cache holds MOST_PRODUCTS products and destroys the others; a destroyed one is created again."""
    monkeypatch.setattr(onednn, "MOST_PRODUCTS", 4)
    monkeypatch.setattr(LIBRARY.of_thread, "products", {})
    given_back = []
    destroy = onednn.Product.destroy
    monkeypatch.setattr(onednn.Product, "destroy", lambda self: (given_back.append(self), destroy(self)))
    w = drawn(24, 40)
    for rows in [*range(1, 8), 7, 6, 1]:
        x = drawn(rows, 40)
        assert_near(ops.linear(x, w), definitions.linear(x, w))
    assert (len(LIBRARY.of_thread.products), len(given_back)) == (4, 4)


@needs_library
@pytest.mark.parametrize("kind", [BF, np.float32])
def test_experts_share_products_whatever_number_of_rows_they_have(monkeypatch, kind):
    """A product for an expert may be computed with additional rows, such as another expert's rows of NaN."""
    monkeypatch.setattr(LIBRARY.of_thread, "products", {})
    w, random = drawn(5, 240, 400).astype(kind), np.random.default_rng(0)
    for number in range(12):
        counts = random.integers(0, 150, 5)
        starts, rows = np.append(0, np.cumsum(counts)), int(counts.sum())
        x, dy, plus, into = (drawn(rows, n).astype(kind) for n in (400, 240, 240, 400))
        if number % 3 == 0 and counts[2]:
            x[starts[2]], dy[starts[2]] = np.nan, np.nan
        actual, expected = np.ones((2, 5, 240, 400), np.float32)
        other = into.copy()
        for version, dw, dx in ((ops, actual, into), (definitions, expected, other)):
            version.grouped_linear_backward_w(dy, x, dw, starts)
            version.grouped_linear_backward_x(dy, w, starts, dx)
        assert_near(actual, expected)
        assert_near(into, other)
        assert_near(ops.grouped_linear(x, w, starts, plus), definitions.grouped_linear(x, w, starts, plus))
    assert len(LIBRARY.of_thread.products) <= 4 * 10  # far fewer than 60 numbers of rows times 3 kinds


@needs_library
def test_a_library_that_computes_wrongly_is_not_used(monkeypatch):
    monkeypatch.setattr(onednn.Product, "__call__", lambda self, arrays: None)
    with pytest.raises(onednn.OneDNNError, match="a product is wrong"):
        onednn.OneDNN(next(iter(onednn.candidates())))


THREADS = """
import ml_dtypes
from threadpoolctl import threadpool_info, threadpool_limits
threadpool_limits(1)
from zero_mpi import ops
ops.products(ml_dtypes.bfloat16)
print([pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp"])
"""


@needs_library
def test_it_takes_as_many_threads_as_the_rank_has():
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    options = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", THREADS], env=variables, **options)
    assert done.stdout == "[1]\n", done.stderr


PRINTED = """
import ml_dtypes, numpy as np
from zero_mpi import ops
x = np.arange(35, dtype=np.float32).reshape(5, 7).astype(ml_dtypes.bfloat16)
print(ops.products(ml_dtypes.bfloat16))
print(ops.linear(x, x).astype(np.float32).tolist())
"""


NOWHERE = {"ZERO_MPI_DNNL": "/nowhere/libdnnl.so"}


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        (NOWHERE, "/nowhere/libdnnl.so is not oneDNN 3"),
        ({"ZERO_MPI_DNNL": "libm.so.6"}, "libm.so.6 is not oneDNN 3"),
        pytest.param({"DNNL_MAX_CPU_ISA": "AVX2"}, "no bfloat16 units", marks=needs_library),
        ({"ZERO_MPI_OPS": "reference"}, "ZERO_MPI_OPS=reference"),
        ({"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT"),
    ],
)
def test_without_a_library_that_can_results_are_right_and_it_is_known_why(environ, reason):
    options = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", PRINTED], env=os.environ | environ, **options)
    note, results = done.stdout.splitlines()
    x = np.arange(35, dtype=np.float32).reshape(5, 7)
    assert reason in note
    assert results == str(reference.linear(x, x).astype(BF).astype(np.float32).tolist())


@needs_mpiexec
@pytest.mark.parametrize(
    ("precision", "environ", "expected"),
    [
        ("bf16", NOWHERE, "--precision bf16 .*is not oneDNN 3"),
        pytest.param("bf16", {}, None, marks=needs_library),
    ],
)
def test_a_run_says_once_what_is_slow(precision, environ, expected, tmp_path):
    flags = ["--layers", "1", "--dim", "24", "--heads", "3"]
    flags += ["--ffn", "17", "--context", "16", "--sample", "0"]
    flags += ["--data", *write_text(tmp_path), "--steps", "1", "--batch-size", "2", "--micro-batch", "1"]
    command = ["-m", "zero_mpi.train", *flags, "--out", str(tmp_path / "out"), "--precision", precision]
    status, printed, errors = run_job(2, command, env={"ZERO_MPI_OPS": "auto", **environ})
    assert status == 0, errors
    lines = [line for line in (printed + errors).splitlines() if "slower than fp32" in line]
    assert len(lines) == (expected is not None), printed
    if expected:
        assert re.search(expected, lines[0])
    # With bf16, a message names oneDNN as the backend or reports that it is missing.
    assert ("oneDNN" in (tmp_path / "out" / "events.jsonl").read_text() + printed) == (precision == "bf16")
