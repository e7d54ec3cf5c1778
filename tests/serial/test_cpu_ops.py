"""The compiled operations match the float64 reference up to float32 rounding, for arrays of any layout."""

import contextlib
import functools
import gc
import inspect
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import misfits
import numpy as np
import pytest
import tiny
from misfits import numbers

from zero_mpi import GradAccum, SerialComm, ShardedAdamW, nn, ops
from zero_mpi.device.arrays import RECYCLED, side_by_side
from zero_mpi.models import GPT2, Llama
from zero_mpi.ops import code_cache, reference

if ops.backend() == "numpy":
    pytest.skip("numba is not installed, or ZERO_MPI_OPS disables it", allow_module_level=True)

from zero_mpi.ops.cpu import attention
from zero_mpi.ops.registry import OPERATIONS, VERSIONS

ops.prepare()
ops.fill_cache(ops.GENERATION)

ROOT = Path(__file__).resolve().parents[2]
FUSED = {name: inspect.unwrap(version) for name, version in VERSIONS[np.ndarray].items()}
cpu = SimpleNamespace(**FUSED)  # compiled versions without argument checks


def ids(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([count, *shape]).integers(count, size=shape)


def strided(x: np.ndarray) -> np.ndarray:
    """Return a view with the same numbers: every second element of a larger array."""
    buffer = np.full([2 * length + 1 for length in x.shape], np.nan if x.dtype.kind == "f" else 0, x.dtype)
    view = buffer[tuple(slice(1, None, 2) for _ in x.shape)]
    view[...] = x
    return view


def column_part(x: np.ndarray) -> np.ndarray:
    buffer = np.zeros((*x.shape[:-1], x.shape[-1] + 5), x.dtype)
    buffer[..., 3:-2] = x
    return buffer[..., 3:-2]


def read_only(x: np.ndarray) -> np.ndarray:
    y = x.copy()
    y.flags.writeable = False
    return y


LAYOUTS = [np.copy, strided, column_part, np.asfortranarray, read_only]


def leaves(x: Any) -> list[np.ndarray]:
    if x is None:
        return []
    return [leaf for item in x for leaf in leaves(item)] if isinstance(x, tuple) else [np.asarray(x)]


def wide(x: Any) -> Any:
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Check equality up to float32 rounding relative to the largest element."""
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        assert a.shape == b.shape
        assert a.dtype in (np.float32, np.float64, np.int64)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(0.05, np.abs(b).max(initial=0)))


def linear_case(lead: tuple[int, ...], inputs: int, outputs: int) -> dict[str, Callable[[], list[Any]]]:
    x, dy, w, b = numbers(*lead, inputs), numbers(*lead, outputs), numbers(outputs, inputs), numbers(outputs)
    targets, dw, db = ids(outputs, *lead), numbers(outputs, inputs, seed=1), numbers(outputs, seed=1)
    return {
        "linear": lambda: [x, w, b],
        "linear, plus": lambda: [x, w, b, dy],
        "linear, plus, no bias": lambda: [x, w, None, dy],
        "linear_backward_x": lambda: [dy, w],
        "linear_backward_x, into": lambda: [dy, w, numbers(*lead, inputs, seed=4)],
        "linear_backward_w": lambda: [dy, x, dw],
        "linear_backward_b": lambda: [dy, db],
        "cross_entropy": lambda: [3 * dy, targets, 0.3],
        "linear_cross_entropy": lambda: [x, w, b, targets, 0.3, dw, db],
        "linear_cross_entropy, no bias": lambda: [x, w, None, targets, 0.3, dw, None],
        "linear_cross_entropy, loss": lambda: [x, w, b, targets, 0.3, None, None, False],
    }


def rope_case(*shape: int) -> dict[str, Callable[[], list[Any]]]:
    angle = numbers(shape[1], shape[3] // 2)
    x, cos, sin = numbers(*shape), np.cos(angle), np.sin(angle)
    tables = cos[:, : shape[3] // 4], sin[:, : shape[3] // 4]
    return {
        "rope, interleaved, partial": lambda: [x, *tables, True],
        "rope, halves, partial": lambda: [x, *tables, False],
        "rope, interleaved": lambda: [x, cos, sin, True],
        "rope, halves": lambda: [x, cos, sin, False],
    }


def by_signature(name: str, lead: tuple[int, ...], width: int, full: bool) -> list[Any]:
    """Return arguments by the operation's signature: all of them (full), or only those without a default."""
    arguments = misfits.fitting(**{"...": lead, "C": width})[name]
    parameters = inspect.signature(OPERATIONS[name]).parameters
    return [x for key, x in arguments.items() if full or parameters[key].default is inspect.Parameter.empty]


SHAPES = [
    (linear_case, [((1,), 1, 1), ((2, 3), 7, 5), ((33,), 65, 130), ((1, 1), 64, 300), ((40,), 1, 2)]),
    (rope_case, [(1, 1, 1, 2), (2, 5, 3, 6), (1, 9, 2, 64), (0, 3, 2, 4)]),
]
CASES = [
    (f"{name} {shape}", name.partition(",")[0], make)
    for cases, shapes in SHAPES
    for shape in shapes
    for name, make in cases(*shape).items()
]
ELSEWHERE = {"causal_attention", "causal_attention_backward", "adamw", "chunk_squares", "moving_average"}
ELSEWHERE |= {"dequantize"}
CASES += [
    (f"{name} {lead} {width} {full}", name, functools.partial(by_signature, name, lead, width, full))
    for name in sorted(FUSED.keys() - ELSEWHERE - {case[1] for case in CASES})
    for lead, width in (((1,), 1), ((2, 3), 5), ((0, 3), 8), ((37,), 65), ((5,), 1025))
    for full in (True, False)
]


def written_by(name: str) -> list[int]:
    outputs = {entry.name for entry in OPERATIONS[name].signature.entries if entry.written}
    return [
        i for i, argument in enumerate(inspect.signature(OPERATIONS[name]).parameters) if argument in outputs
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize(("name", "make"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_fused_is_the_reference(name, make, layout):
    outputs = [i for i in written_by(name) if i < len(make())]
    arguments = [
        (np.copy if i in outputs else layout)(x) if isinstance(x, np.ndarray) and x.ndim else x
        for i, x in enumerate(make())
    ]
    exact = [wide(x) for x in make()]
    before = [x.tobytes() if isinstance(x, np.ndarray) else x for x in arguments]
    actual, expected = FUSED[name](*arguments), getattr(reference, name)(*exact)
    close(actual, expected)
    for i, x in enumerate(arguments):
        if i in outputs:
            close(x, exact[i])
        elif isinstance(x, np.ndarray):
            assert x.tobytes() == before[i], f"argument {i} was written"


def test_all_operations_are_fused():
    assert OPERATIONS.keys() - FUSED.keys() == {"linear_wide", "route_backward"}  # matmul; small operation
    assert all(OPERATIONS[name].registry[np.ndarray] is VERSIONS[np.ndarray][name] for name in FUSED)


@pytest.mark.parametrize("operations", [cpu, reference])
@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_are_turned_where_they_lie(operations, interleaved):
    angle, x = numbers(5, 3), numbers(2, 5, 3, 6)
    expected = operations.rope(x, np.cos(angle), np.sin(angle), interleaved)
    assert operations.rope(x, np.cos(angle), np.sin(angle), interleaved, x) is x
    assert x.tobytes() == expected.tobytes()


def test_float64_goes_to_the_reference():
    x = np.random.default_rng(0).standard_normal((3, 7))
    assert cpu.gelu(x).tobytes() == reference.gelu(x).tobytes()
    assert cpu.rms_norm(x, x[0], 0.1)[0].dtype == np.float64


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3, 63, 64])
def test_what_is_not_finite_is_never_hidden(bad, place):
    """If the reference's result is not finite, neither is the kernel's, so the step is skipped."""
    x = numbers(65)
    x[place] = bad
    row, w = x[None], np.ones(65, np.float32)
    pairs = {"add": (x, x), "scale": (x, 0.3), "gelu": (x,), "swiglu": (x, numbers(65))}
    pairs |= {"geglu": (x, numbers(65)), "rms_norm": (row, w, 1e-5), "layer_norm": (row, w, w, 1e-5)}
    pairs |= {"linear": (row, numbers(3, 65)), "cross_entropy": (row, np.array([5]), 1.0)}
    pairs |= {"chunk_squares": (x, 65)}
    with np.errstate(all="ignore"):
        for name, arguments in pairs.items():
            actual, expected = FUSED[name](*arguments), getattr(reference, name)(*arguments)
            for a, b in zip(leaves(actual), leaves(expected), strict=True):
                assert np.isfinite(b).all() or not np.isfinite(a).all(), name
        y, _ = cpu.causal_attention(*(x.reshape(1, 65, 1, 1) for _ in range(3)), 1.0)
        assert not np.isfinite(y[0, place:].sum())


@pytest.mark.parametrize("bad", [-2, 5, 10**12])
def test_an_id_out_of_range_is_an_error(bad):
    tokens, w, x = np.array([[0, bad, 4]]), numbers(5, 7), numbers(1, 3, 7)
    for call in (
        lambda: cpu.embedding(tokens, w),
        lambda: cpu.embedding_backward(tokens, x, w.copy()),
        lambda: cpu.cross_entropy(numbers(1, 3, 5), tokens, 1.0),
        lambda: cpu.linear_cross_entropy(x, w, None, tokens, 1.0),
    ):
        with pytest.raises(IndexError, match=f"token {bad} is not one of 5"):
            call()


ATTENTION = [  # B, T queries, S keys, H heads, K key/value heads, widths D of keys and E of values
    (1, 1, 1, 1, 1, 1, 1),
    (2, 5, 5, 6, 2, 3, 4),
    (1, 3, 7, 3, 3, 2, 2),
    (2, 1, 90, 4, 1, 8, 5),
    (1, 63, 63, 2, 2, 16, 16),
    (1, 64, 64, 2, 1, 16, 8),
    (2, 65, 65, 2, 2, 7, 9),
    (1, 130, 200, 3, 1, 16, 16),
    (1, 200, 200, 4, 2, 32, 24),
    (2, 530, 600, 2, 1, 3, 5),
    (1, 1100, 1160, 3, 1, 4, 3),
    (1, 2100, 2100, 2, 2, 3, 2),
]


def attention_inputs(shape: tuple[int, ...], joint: bool) -> list[np.ndarray]:
    """Return q, k, v, dy; joint: q, k, v are columns of one array."""
    b, t, s, h, kv, d, e = shape
    q, k, v = numbers(b, t, h, d), numbers(b, s, kv, d, seed=1), numbers(b, s, kv, e, seed=2)
    if joint:
        buffer = np.concatenate([x.reshape(*x.shape[:2], -1) for x in (q, k, v)], axis=-1)
        parts = np.split(buffer, [h * d, (h + kv) * d], axis=-1)
        q, k, v = (part.reshape(x.shape) for part, x in zip(parts, (q, k, v), strict=True))
    return [q, k, v, numbers(b, t, h, e, seed=3)]


@pytest.mark.parametrize("keep", [True, False], ids=["weights kept", "weights again"])
@pytest.mark.parametrize("shape", ATTENTION, ids=str)
def test_attention_is_the_reference(monkeypatch, shape, keep):
    monkeypatch.setattr(attention, "KEPT_WEIGHTS", 1 << 18 if keep else 0)
    for joint in [False, True] if shape[1] == shape[2] else [False]:
        q, k, v, dy = inputs = attention_inputs(shape, joint)
        before, documents = (
            [x.tobytes() for x in inputs],
            np.arange(shape[2] - shape[1], shape[2]) // 700 * 700,
        )
        begins = np.tile(documents, (shape[0], 1)) if joint else None
        y, saved = cpu.causal_attention(q, k, v, 0.7, begins)
        assert (saved[0] is not None) == (keep and shape[1] < 1000)
        gradients = cpu.causal_attention_backward(dy, q, k, v, saved, 0.7)
        assert [x.tobytes() for x in inputs] == before
        exact = [wide(x) for x in inputs]
        expected, weights = reference.causal_attention(*exact[:3], 0.7, begins)
        close(y, expected)
        close(gradients, reference.causal_attention_backward(exact[3], *exact[:3], weights, 0.7), 5e-5)
        assert (side_by_side(gradients) is not None) == joint, "gradients must have the inputs' layout"


@contextlib.contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    peaks, before = {}, RECYCLED.nbytes
    tracemalloc.start()
    try:
        yield peaks
        peaks["else"] = tracemalloc.get_traced_memory()[1]
        peaks["pool"] = RECYCLED.nbytes - before
    finally:
        tracemalloc.stop()


def test_attention_to_long_texts_takes_memory_of_their_length_only():
    """Memory grows linearly with T; all attention weights for T = 4096 would take 128 MiB."""
    q, k, v, dy = attention_inputs((1, 4096, 4096, 2, 1, 16, 16), False)
    with peak_memory() as peak:
        y, saved = cpu.causal_attention(q, k, v, 0.25)
        gradients = cpu.causal_attention_backward(dy, q, k, v, saved, 0.25)
    arrays = sum(x.nbytes for x in (y, *gradients))
    blocks = 3 * attention.BLOCK * 4096 * 4
    assert peak["pool"] <= (arrays + blocks) * 9 / 8 + 2**16
    assert peak["else"] < (arrays + blocks) * 9 / 8 + 2**19
    assert saved[0] is None
    rows = [0, 1, 63, 64, 2000, 4095]
    for t in rows:
        scores = 0.25 * wide(k[0, : t + 1, 0]) @ wide(q[0, t, 1])
        weights = np.exp(scores - scores.max())
        close(y[0, t, 1], weights @ wide(v[0, : t + 1, 0]) / weights.sum())


@pytest.mark.parametrize(("name", "make"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_same_bits_again_in_other_places(name, make):
    def once(shift: int) -> list[bytes]:
        arguments = []
        for x in make():
            if isinstance(x, np.ndarray) and x.ndim:
                buffer = np.empty(x.size + shift, x.dtype)  # for arrays at other offsets from a cache line
                buffer[shift:] = x.reshape(-1)
                x = buffer[shift:].reshape(x.shape)
            arguments.append(x)
        results = leaves(FUSED[name](*arguments))
        return [
            x.tobytes()
            for x in [*results, *leaves(tuple(arguments[i] for i in written_by(name) if i < len(arguments)))]
        ]

    first = once(0)
    assert all(once(shift) == first for shift in (1, 3, 16))


UPDATE = {"grad_scale": 0.3, "lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": 3}


def update_state(size: int) -> list[np.ndarray]:
    return [numbers(size, seed=seed) for seed in range(3)] + [numbers(size, seed=3) ** 2]


@pytest.mark.parametrize("operations", [cpu, reference])
def test_an_update_of_runs_that_decay_differently_is_that_of_each_run(operations):
    decay = np.array([0.1, 0.0, 0.0, 0.3, 0.1])
    state, pieces = update_state(5 * 1024), update_state(5 * 1024)
    operations.adamw(*state, **UPDATE, decay=decay)
    for run in range(5):
        parts = [x[1024 * run : 1024 * (run + 1)] for x in pieces]
        operations.adamw(*parts, **UPDATE, decay=decay[run : run + 1])
    assert [x.tobytes() for x in state] == [x.tobytes() for x in pieces]
    assert not np.array_equal(pieces[0][:1024], update_state(5 * 1024)[0][:1024])


@pytest.mark.parametrize("n", [0, 1, 3, 4, 63, 64, 65, 130, 4096])
def test_the_sum_over_rows_has_the_order_of_its_definition(n):
    """The kernel adds rows in the order of the definition, so the results are bit-identical."""
    dy = numbers(n, 40) + 1
    actual, expected = numbers(40, seed=5), numbers(40, seed=5)
    cpu.linear_backward_b(dy, actual)
    reference.linear_backward_b(dy, expected)
    assert actual.tobytes() == expected.tobytes()
    close(actual, numbers(40, seed=5) + wide(dy).sum(axis=0))


def test_a_head_never_holds_more_than_a_chunk_of_logits(monkeypatch):
    monkeypatch.setattr(reference, "LOGITS_BYTES", 1 << 20)
    x, w, targets = numbers(512, 16), numbers(9000, 16), ids(9000, 512)  # 18 MB of logits
    dw = np.zeros_like(w)
    with peak_memory() as peak:
        loss, dx = cpu.linear_cross_entropy(x, w, None, targets, 1 / 512, dw)
    assert peak["pool"] <= (2**20 + dx.nbytes) * 9 / 8
    assert peak["else"] <= (2**20 + dx.nbytes) * 9 / 8 + 2**16
    expected = reference.linear_cross_entropy(wide(x), wide(w), None, targets, 1 / 512)
    close((loss, dx), expected)


MODELS = {
    "llama": Llama.from_flags(
        {"layers": 3, "dim": 64, "heads": 4, "kv_heads": 2, "context": 80, "vocab_size": 400}
    ),
    "gpt2": GPT2.from_flags({"layers": 3, "dim": 64, "heads": 4, "context": 80, "vocab_size": 400}),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_allocates_nothing_large_once_it_is_warm(name, recompute):
    model = MODELS[name]
    module = tiny.make(SerialComm(), model, recompute=recompute)
    optimizer, accumulator = ShardedAdamW(module), GradAccum(module, 2)

    text = ids(400, 4, 81)
    x, targets = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])

    def step() -> None:
        for _ in range(2):
            accumulator.accumulate(x, nn.CrossEntropy(targets, 1 / 640))
        optimizer.step(max_norm=1.0)

    gc.collect()  # frees arrays of earlier tests that would be freed during the measurement
    leases = sum(block.lease is not None for block in RECYCLED._blocks)
    step()
    step()
    nbytes = RECYCLED.nbytes
    assert nbytes > 2**20, "the step's arrays must be large enough for the pool"
    growths = []
    tracemalloc.start()
    try:
        for _ in range(4):
            tracemalloc.reset_peak()
            base = tracemalloc.get_traced_memory()[0]
            step()
            growths.append(tracemalloc.get_traced_memory()[1] - base)
    finally:
        tracemalloc.stop()
    growth = min(growths)  # a thread of an earlier test may allocate during one of the steps
    assert RECYCLED.nbytes == nbytes
    assert sum(block.lease is not None for block in RECYCLED._blocks) == leases  # a step keeps nothing
    assert growth < 100_000, f"{growth} bytes outside the pool at once; one activation has 82 kB"


def python(code: str, **variables: str) -> Any:
    environment = {k: v for k, v in os.environ.items() if k not in ("ZERO_MPI_OPS", "NUMBA_CACHE_DIR")}
    command = [sys.executable, "-W", "error", "-c", code]
    options = {"capture_output": True, "text": True, "cwd": ROOT, "check": False}
    result = subprocess.run(command, env=environment | variables, **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


COMPUTE = """
import json, sys
from zero_mpi import ops
import numpy as np
before = "numba" in sys.modules
y = ops.gelu(np.ones(3, np.float32))
print(json.dumps([before, "numba" in sys.modules, ops.backend()]))
"""


@pytest.mark.parametrize(
    ("before", "variables", "expected"),
    [
        ("", {}, [False, True, ops.backend()]),
        ("", {"ZERO_MPI_OPS": "reference"}, [False, False, "numpy"]),
        ("", {"NUMBA_DISABLE_JIT": "1"}, [False, False, "numpy"]),
        ('import sys; sys.modules["numba"] = None', {}, [True, True, "numpy"]),
    ],
)
def test_numba_is_loaded_when_something_is_computed_unless_the_reference_computes(
    before, variables, expected
):
    assert python(before + COMPUTE, **variables) == expected


def test_another_blas_than_openblas_is_reached_through_scipy():
    pytest.importorskip("scipy", reason="scipy is not installed")
    result = python(
        """
import json
import threadpoolctl
select = threadpoolctl.ThreadpoolController.select
def no_openblas(self, **by):
    return select(self, **({"prefix": "none such"} if "internal_api" in by else by))
threadpoolctl.ThreadpoolController.select = no_openblas
from zero_mpi import ops
import numpy as np
x, w = np.arange(6, dtype=np.float32).reshape(2, 3), np.eye(3, dtype=np.float32)
y = ops.linear(x, w).tolist()
threadpoolctl.ThreadpoolController.select = select
pools = threadpoolctl.ThreadpoolController().select(user_api="blas").info()
print(json.dumps([y, [pool["num_threads"] for pool in pools]]))
""",
        OPENBLAS_NUM_THREADS="1",
    )
    assert result == [[[0, 1, 2], [3, 4, 5]], [1, 1]], "both libraries must use one thread"


CACHED = """
import json, sys
import numpy as np
from zero_mpi import ops
from zero_mpi.ops import code_cache
said = []
ops.prepare(said.append)
ops.fill_cache(ops.GENERATION, said.append)
ops.gelu(np.ones(4, np.float32))
from zero_mpi.ops.cpu import jit
kernels = [kernel for kernel, *_ in jit._kernels]
compiled = sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels if kernel.signatures)
loaded = sorted(kernel.__name__ for kernel in kernels if kernel.signatures)
unasked = [name for name in ("scipy.linalg", "numba.np.linalg", "mpi4py", "jinja2") if name in sys.modules]
unasked += [str(kernel) for kernel in kernels if len(kernel.signatures) > 1]
print(json.dumps([len(said), compiled == len(kernels), loaded, unasked, str(code_cache.folder())]))
"""


def test_kernels_are_loaded_when_they_are_used():
    status, compiled, loaded, extra, _ = python(CACHED)
    assert (status, compiled, loaded) == (0, False, ["gelu_forward"]), "only gelu_forward is loaded"
    assert extra == []


@pytest.mark.long
@pytest.mark.timeout_seconds(300)
def test_kernels_are_compiled_once_and_then_loaded(tmp_path):
    cold = python(CACHED, NUMBA_CACHE_DIR=str(tmp_path))
    assert (cold[:2], len(cold[2]) > 20) == ([2, True], True), "all kernels are compiled, with two notes"
    assert cold[3] == ["numba.np.linalg"], "neither bfloat16 kernels nor SciPy's BLAS"
    assert Path(cold[4]).parent == tmp_path
    warm = python(CACHED, NUMBA_CACHE_DIR=str(tmp_path))
    assert warm == [0, False, ["gelu_forward"], [], cold[4]], "one kernel is loaded and none is compiled"


@pytest.fixture
def fresh_folder(monkeypatch):
    code_cache.folder.cache_clear()
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch.setenv
    code_cache.folder.cache_clear()


def test_the_cache_lies_in_the_users_own(fresh_folder, tmp_path):
    fresh_folder("HOME", str(tmp_path))
    assert code_cache.folder().parent == tmp_path / ".cache" / "zero_mpi"
    assert not code_cache.is_complete("float32")
    code_cache.mark_complete("float32")
    assert (code_cache.is_complete("float32"), code_cache.is_complete("bfloat16")) == (True, False)
    code_cache.folder.cache_clear()
    fresh_folder("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert code_cache.folder().parent == tmp_path / "xdg" / "zero_mpi"


def test_where_nothing_can_be_written_a_temporary_folder_serves(fresh_folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    fresh_folder("NUMBA_CACHE_DIR", str(tmp_path / "file" / "a"))
    fresh_folder("HOME", "/proc/nothing")
    monkeypatch.setattr(code_cache.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    monkeypatch.setattr(code_cache.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "last"))
    assert code_cache.folder() == tmp_path / "last"
    code_cache.mark_complete("float32")  # must not fail without a folder


def test_a_folder_that_others_can_write_is_not_trusted(fresh_folder, tmp_path):
    shared = tmp_path / "shared" / code_cache.key()
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    fresh_folder("NUMBA_CACHE_DIR", str(tmp_path / "shared"))
    fresh_folder("HOME", str(tmp_path))
    assert code_cache.folder().parent == tmp_path / ".cache" / "zero_mpi"
