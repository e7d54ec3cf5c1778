"""Matmuls on the GPU: the linear layer and the head's loss match their definitions.

The simulated device has a strict simulation of cuBLASLt (tests/pretend/nvmath). Its names, numbers and
sizes are compared with the real bindings if these are installed.
"""

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from zero_mpi import ops
from zero_mpi.arguments import UNCOUNTED
from zero_mpi.device.arrays import pool_of
from zero_mpi.errors import UsageError
from zero_mpi.ops import low_precision, reference, sizes

KINDS = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
LOW = {"bf16": 2.0**-7, "f16": 2.0**-10}  # one unit in the last place, twice the rounding error
SHAPES = [(1, 1, 1), (1, 7, 3), (5, 3, 2), (33, 17, 65), (64, 96, 40), (257, 129, 131)]  # N, C, O
kinds = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.world(1)  # a single process


def draw(kind, *shape, seed=0, scale=1.0):
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(KINDS[kind])


def close(actual, expected, kind, slack=2e-6, added=None):
    """Check that two results agree up to the order of float32 sums and, in bf16 and f16, one rounding.

    added: the value that was added to a product, which may have been rounded before.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    allowed = LOW.get(kind, 0.0) * np.abs(expected) + slack * (1.0 + np.abs(expected).max(initial=0.0))
    if added is not None:
        allowed += LOW.get(kind, 0.0) / 2 * np.abs(expected - np.asarray(added, np.float64))
    worst = np.abs(actual - expected) - allowed
    assert (worst <= 0).all(), f"off by {worst.max()} at {np.unravel_index(worst.argmax(), expected.shape)}"


def defined(name):
    return low_precision.accept_low(name, getattr(reference, name))


@pytest.fixture
def gemm(gpu):
    from zero_mpi.ops.gpu import gemm

    before, gemm._products = gemm._products, None
    yield gemm
    gpu.synchronize()
    gemm._products = before


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("extras", ["", "b", "plus", "b plus"])
def test_linear(gpu, kind, shape, extras):
    n, c, o = shape
    inputs = [draw(kind, n, c), draw(kind, o, c, scale=c**-0.5)]
    options = {"b": draw(kind, o), "plus": draw(kind, n, o, seed=3)}
    options = {name: options[name] for name in extras.split()}
    expected = defined("linear")(*inputs, **options)
    actual = ops.linear(*map(gpu.from_host, inputs), **{k: gpu.from_host(x) for k, x in options.items()})
    assert actual.dtype == KINDS[kind]
    close(gpu.to_host(actual), expected, kind, added=sum(np.asarray(x, np.float64) for x in options.values()))


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_linear_backward_x(gpu, kind, shape, adds):
    n, c, o = shape
    dy, w, before = draw(kind, n, o), draw(kind, o, c, scale=o**-0.5), draw(kind, n, c, seed=1)
    expected = defined("linear_backward_x")(dy, w, before.copy() if adds else None)
    into = gpu.from_host(before) if adds else None
    actual = ops.linear_backward_x(gpu.from_host(dy), gpu.from_host(w), into)
    assert actual is into or not adds
    close(gpu.to_host(actual), expected, kind, added=before if adds else None)


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gradient", ["own", "f32"])
def test_gradients_of_weights_are_added_into_their_own_type(gpu, kind, shape, gradient):
    n, c, o = shape
    dtype = kind if gradient == "own" else "f32"
    dy, x = draw(kind, n, o, scale=n**-0.5), draw(kind, n, c)
    for name, sides, before in (
        ("linear_backward_w", (dy, x), draw(dtype, o, c, seed=1)),
        ("linear_backward_b", (dy,), draw(dtype, o, seed=2)),
    ):
        expected = before.copy()
        defined(name)(*sides, expected)
        actual = gpu.from_host(before)
        assert getattr(ops, name)(*map(gpu.from_host, sides), actual) is None
        close(gpu.to_host(actual), expected, dtype, added=before)


@kinds
def test_columns_of_a_wider_array_are_read_and_written_where_they_lie(gpu, kind):
    wide, w = draw(kind, 3, 5, 48), draw(kind, 24, 16, scale=0.25)
    on_gpu, w_gpu = gpu.from_host(wide), gpu.from_host(w)
    for columns in (slice(16, 32), slice(3, 19)):  # aligned and unaligned
        actual = gpu.to_host(ops.linear(on_gpu[..., columns], w_gpu))
        close(actual, defined("linear")(wide[..., columns], w), kind)
        dw, expected = gpu.zeros(24 * 16, KINDS[kind]).reshape(24, 16), np.zeros((24, 16), KINDS[kind])
        ops.linear_backward_w(on_gpu[..., 24:], on_gpu[..., columns], dw)
        defined("linear_backward_w")(wide[..., 24:], wide[..., columns], expected)
        close(gpu.to_host(dw), expected, kind)
        into, expected = gpu.from_host(wide), wide.copy()
        ops.linear_backward_x(on_gpu[..., :24], w_gpu, into[..., columns])
        expected[..., columns] = defined("linear_backward_x")(wide[..., :24], w, wide[..., columns].copy())
        close(gpu.to_host(into), expected, kind, added=wide)


@kinds
def test_rows_that_lie_unevenly_are_brought_together(gpu, kind):
    x, w, plus = draw(kind, 4, 6, 8), draw(kind, 5, 8), draw(kind, 4, 6, 5)
    actual = ops.linear(gpu.from_host(x)[:, 1:4], gpu.from_host(w), None, gpu.from_host(plus)[:, 2:5])
    close(gpu.to_host(actual), defined("linear")(x[:, 1:4], w, None, plus[:, 2:5]), kind)
    turned = ops.linear(gpu.from_host(x.swapaxes(1, 2).copy()).swapaxes(1, 2), gpu.from_host(w))  # columns
    close(gpu.to_host(turned), defined("linear")(x, w), kind)


def test_a_plan_adds_the_bias_of_the_call_and_not_that_of_its_making(gpu):
    x, w = draw("bf16", 6, 8), draw("bf16", 8, 8)
    arrays, biases = [gpu.from_host(item) for item in (x, w)], [draw("bf16", 8, seed=n) for n in range(3)]
    on_gpu = [gpu.from_host(b) for b in biases]
    for n in (0, 1, 0, 2):
        close(gpu.to_host(ops.linear(*arrays, on_gpu[n])), defined("linear")(x, w, biases[n]), "bf16")


@kinds
def test_a_bias_that_no_algorithm_adds(gpu, kind, monkeypatch):
    from zero_mpi.ops.gpu import gemm

    products = gemm.products()
    if not hasattr(products.lt, "refuses"):
        pytest.skip("a real cuBLASLt cannot be made to refuse a matmul")
    monkeypatch.setattr(products, "plans", {})
    monkeypatch.setattr(products.lt, "refuses", [gemm.EPILOGUE_BIAS])
    x, w, plus = draw(kind, 7, 3), draw(kind, 5, 3), draw(kind, 7, 5, seed=3)
    for seed in (1, 2):  # the second call uses the cached plan
        b = draw(kind, 5, seed=seed)
        actual = ops.linear(*map(gpu.from_host, (x, w, b, plus)))
        once_more = LOW.get(kind, 1e-6)  # the product is rounded once more before the bias is added
        close(gpu.to_host(actual), defined("linear")(x, w, b, plus), kind, once_more)
    assert len(products.plans) == 1
    monkeypatch.setattr(products.lt, "refuses", [gemm.EPILOGUE_BIAS, gemm.EPILOGUE_DEFAULT])
    with pytest.raises(ValueError, match="knows no algorithm"):
        ops.linear(gpu.from_host(x[:5]), gpu.from_host(w), gpu.from_host(b))


def test_float32_products_are_no_tf32(gpu):
    """TF32 has 10 fraction bits and would round 1 + 2^-12 to 1."""
    x = np.full((32, 64), 1 + 2.0**-12, np.float32)
    actual = gpu.to_host(ops.linear(gpu.from_host(x), gpu.from_host(np.eye(64, dtype=np.float32))))
    assert (actual == x).all()


def test_low_sums_are_float32(gpu):
    """A sum of 4097 ones is 4097; sums in bfloat16 would stop at 256, in float16 at 2048."""
    for kind in ("bf16", "f16"):
        ones = gpu.from_host(np.ones((8, 4097), KINDS[kind]))
        total = np.zeros((8, 8), np.float32)
        into = gpu.from_host(total)
        ops.linear_backward_w(ones.T.copy(), ones.T.copy(), into)
        assert (gpu.to_host(into) == 4097.0).all()


def head_case(kind, n, c, v, sum_kind=None):
    x, w, b = draw(kind, n, c), draw(kind, v, c, scale=c**-0.5), draw(kind, v, scale=0.1)
    targets = np.random.default_rng(n).integers(0, v, n)
    sums = draw(sum_kind or kind, v, c, seed=5, scale=0.01), draw(sum_kind or kind, v, seed=6, scale=0.01)
    return x, w, b, targets, *sums


@kinds
@pytest.mark.parametrize("own", ["own", "f32"])
@pytest.mark.parametrize(
    ("n", "c", "v", "rows"), [(1, 8, 2, 100), (30, 16, 37, 7), (65, 24, 256, 16), (9, 5, 11, 1)]
)
def test_head_in_chunks(gpu, kind, own, n, c, v, rows, monkeypatch):
    monkeypatch.setattr(sizes, "LOGITS_BYTES", rows * -(-v // 8) * 8 * KINDS[kind].itemsize)
    x, w, b, targets, dw, db = head_case(kind, n, c, v, "f32" if own == "f32" else None)
    targets[1::3] = UNCOUNTED
    truths = [dw.copy(), db.copy()]
    loss, dx = defined("linear_cross_entropy")(x, w, b, targets, 1.0 / n, *truths)
    sums = [gpu.from_host(dw), gpu.from_host(db)]
    inputs = [gpu.from_host(item) for item in (x, w, b, targets)]
    actual, actual_dx = ops.linear_cross_entropy(*inputs, 1.0 / n, *sums)
    assert actual.shape == ()
    assert actual.dtype == np.float64
    rough = 2e-6 if kind == "f32" else 4 * LOW[kind] / n  # logits and their gradients have this dtype too
    assert abs(float(actual) - float(loss)) <= (1e-5 if kind == "f32" else 2 * LOW[kind])
    close(gpu.to_host(actual_dx), dx, kind, slack=rough)
    for ours, truth in zip(sums, truths, strict=True):
        close(gpu.to_host(ours), truth, kind if own == "own" else "f32", slack=rough)


@kinds
def test_head_without_gradients_only_tells_the_loss(gpu, kind):
    x, w, b, targets, *_ = head_case(kind, 12, 8, 30)
    expected, _ = defined("linear_cross_entropy")(x, w, b, targets, 0.5, need_dx=False)
    actual, dx = ops.linear_cross_entropy(*map(gpu.from_host, (x, w, b)), targets, 0.5, need_dx=False)
    assert dx is None
    assert abs(float(actual) - expected) < (1e-5 if kind == "f32" else 50 * LOW[kind] / 10)


def a_step(gpu, arrays):
    x, w, b, dw, db, targets = arrays
    y = ops.linear(x, w, b, x)
    dx = ops.linear_backward_x(y, w, x.copy())
    ops.linear_backward_w(dx, y, dw)
    ops.linear_backward_b(dx, db)
    loss, dx = ops.linear_cross_entropy(y, w, None, targets, 0.01, dw)
    return [gpu.to_host(item) for item in (y, dx, dw, db, loss)]


def step_arrays(gpu, kind):
    n, c = 96, 128
    host = [draw(kind, n, c), draw(kind, c, c, scale=c**-0.5), draw(kind, c), draw(kind, c, c), draw(kind, c)]
    return [gpu.from_host(x) for x in host] + [gpu.from_host(np.arange(n) % c)]


@kinds
def test_two_runs_have_the_same_bits(gpu, kind):
    first, second = (a_step(gpu, step_arrays(gpu, kind)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.tobytes() == other.tobytes()


@kinds
def test_a_step_makes_no_plans_and_takes_no_memory_after_the_first_two(gpu, gemm, kind):
    arrays = step_arrays(gpu, kind)

    def state():
        gpu.synchronize()
        pool = gpu.cupy.get_default_memory_pool()
        forms = gemm.row_step.cache_info().misses  # number of distinct shapes and strides
        return len(gemm.products().plans), pool_of(gpu).nbytes, pool.total_bytes(), forms

    for _ in range(2):
        a_step(gpu, arrays)
    before = state()
    for _ in range(3):
        a_step(gpu, arrays)
    assert state() == before
    assert before[0] >= 5


def test_the_fastest_algorithm_is_looked_for_on_request(gpu, gemm, monkeypatch):
    monkeypatch.setenv("ZERO_MPI_GPU_TUNE", "1")
    dy, x, before = draw("bf16", 64, 24), draw("bf16", 64, 40), draw("f32", 24, 40)
    exact, dw = before.copy(), gpu.from_host(before)
    defined("linear_backward_w")(dy, x, exact)
    ops.linear_backward_w(gpu.from_host(dy), gpu.from_host(x), dw)
    assert gemm.products().reductions == gemm.FLOAT32_PARTS
    close(gpu.to_host(dw), exact, "f32")  # the product was added once, although it was timed several times


def test_inner_sums_are_whole_on_request(gpu, gemm, monkeypatch):
    assert gemm.products().reductions == gemm.FLOAT32_PARTS
    assert not gemm.products().tunes
    assert gemm.about().startswith("products by cuBLASLt 1")
    assert gemm.about().endswith(", in float32 parts")
    monkeypatch.setenv("ZERO_MPI_GPU_SPLIT_K", "0")
    gemm._products = None
    assert gemm.products().reductions == gemm.WHOLE
    assert gemm.about().endswith(", whole sums")


@pytest.mark.parametrize("where", ["products", "kernels", "sums"])
@pytest.mark.parametrize(
    "error", [RuntimeError("no libX.so.13\nsecond line"), OSError("no libX.so.13")], ids=repr
)
def test_a_missing_library_of_cuda_is_one_line(gpu, gemm, monkeypatch, where, error):
    from zero_mpi.device import ordered_sum
    from zero_mpi.ops.gpu import launch
    from zero_mpi.ops.gpu.elementwise import ADD_ROW

    def missing(*_, **__):
        raise error

    calls = {
        "products": lambda: gemm.Products(gpu),
        "kernels": next(iter(ADD_ROW.values())).bind,
        "sums": ordered_sum.kernels.__wrapped__,
    }
    if where == "products":
        monkeypatch.setattr(gemm.import_lt(), "create", missing)
    else:
        compiled = SimpleNamespace(get_function=missing)
        monkeypatch.setattr(launch, "module", lambda source: compiled)
        monkeypatch.setattr(gpu.cupy, "RawModule", lambda **_: compiled)
    with pytest.raises(UsageError) as refusal:
        calls[where]()
    text = str(refusal.value)
    assert "\n" not in text
    for part in ("--device cuda", "no libX.so.13", "'cupy-cuda13x[ctk]'", "'nvmath-python[cu13]'"):
        assert part in text


@kinds
def test_batches(gpu, gemm, kind):
    a, b = draw(kind, 2, 3, 17, 8), draw(kind, 2, 3, 21, 8)
    out = gpu.from_host(np.full((2, 3, 17, 21), np.nan, np.float32))  # NaN must not be read
    arrays = [gpu.from_host(x) for x in (a, b)]
    sides = [gemm.batched(x) for x in arrays]
    gemm.multiply(*sides, gemm.batched(out), tb=True, scale=0.5)
    wide = [x.astype(np.float32) for x in (a, b)]
    close(gpu.to_host(out), 0.5 * wide[0] @ wide[1].swapaxes(-1, -2), "f32")
    part = sides[0].part(4, 6)
    gemm.multiply(part, sides[1].part(0, 5), gemm.batched(out)._replace(rows=6, columns=5), tb=True)
    close(gpu.to_host(out)[..., :6, :5], wide[0][..., 4:10, :] @ wide[1][..., :5, :].swapaxes(-1, -2), "f32")


REAL = """
import json, inspect
import numpy as np
from nvmath import CudaDataType
from nvmath.bindings import cublas, cublasLt as lt
enums = {"matmul_desc": "MatmulDescAttribute", "matrix_layout": "MatrixLayoutAttribute",
         "matmul_preference": "MatmulPreferenceAttribute"}
names = {name: {m.name: int(m) for m in getattr(lt, name)}
         for name in (*enums.values(), "Epilogue", "ReductionScheme")}
names["Operation"] = {m.name: int(m) for m in cublas.Operation}
names["ComputeType"] = {m.name: int(m) for m in cublas.ComputeType}
names["CudaDataType"] = {m.name: int(m) for m in CudaDataType}
forms = {kind: {name: np.dtype(getattr(lt, f"get_{kind}_attribute_dtype")(names[enum][name])).itemsize
                for name in USED[enum]} for kind, enum in enums.items()}
functions = {name: list(inspect.signature(getattr(lt, name)).parameters) for name in FUNCTIONS}
print(json.dumps([names, forms, functions, issubclass(lt.cuBLASLtError, Exception)]))
"""
FUNCTIONS = (
    "create", "get_version", "matmul", "matmul_algo_get_heuristic", "matmul_desc_create",
    "matmul_desc_destroy", "matmul_desc_set_attribute", "matmul_preference_create",
    "matmul_preference_destroy", "matmul_preference_set_attribute", "matrix_layout_create",
    "matrix_layout_destroy", "matrix_layout_set_attribute", "get_matmul_desc_attribute_dtype",
    "get_matrix_layout_attribute_dtype", "get_matmul_preference_attribute_dtype",
)  # fmt: skip


def ask_the_real(package, script):
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: the names that are used from it are not checked")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", script], env=environment, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout_seconds(150)
def test_names_numbers_and_sizes_are_those_of_the_real_bindings(gpu):
    import inspect

    from nvmath.bindings import cublasLt as lt

    from zero_mpi.ops.gpu import gemm

    if not hasattr(lt, "refuses"):
        pytest.skip("the real bindings are in use, not the simulated ones")
    kinds_of = {"matmul_desc": lt.MatmulDescAttribute, "matrix_layout": lt.MatrixLayoutAttribute}
    kinds_of["matmul_preference"] = lt.MatmulPreferenceAttribute
    used = {attributes.__name__: [item.name for item in attributes] for attributes in kinds_of.values()}
    script = f"FUNCTIONS = {FUNCTIONS}\nUSED = {used}\n{REAL}"
    names, forms, functions, has_error = ask_the_real("nvmath-python", script)
    assert has_error
    assert names["ComputeType"]["COMPUTE_32F"] == gemm.COMPUTE_32F
    assert (names["Operation"]["N"], names["Operation"]["T"]) == (gemm.NORMAL, gemm.TRANSPOSED)
    epilogues = names["Epilogue"]
    assert (epilogues["DEFAULT"], epilogues["BIAS"]) == (gemm.EPILOGUE_DEFAULT, gemm.EPILOGUE_BIAS)
    schemes = names["ReductionScheme"]
    assert (schemes["NONE"], schemes["COMPUTE_TYPE"]) == (gemm.WHOLE, gemm.FLOAT32_PARTS)
    types = names["CudaDataType"]
    assert {np.dtype(k): types[v] for k, v in TYPE_NAMES.items()} == gemm.KINDS
    for kind, attributes in kinds_of.items():
        for item in attributes:
            assert names[attributes.__name__][item.name] == item
            size = np.dtype(getattr(lt, f"get_{kind}_attribute_dtype")(item)).itemsize
            assert forms[kind][item.name] == size, item
    for name in FUNCTIONS:
        assert functions[name] == list(inspect.signature(getattr(lt, name)).parameters), name


TYPE_NAMES = {np.float32: "CUDA_R_32F", np.float16: "CUDA_R_16F", ml_dtypes.bfloat16: "CUDA_R_16BF"}
