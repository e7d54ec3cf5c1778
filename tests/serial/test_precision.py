"""Tests of low precision on the host: rounding, the loss scale, and resumed runs."""

import json
import math
from functools import partial

import misfits
import ml_dtypes
import numpy as np
import pytest
import tiny
from jobs import run_job

from zero_mpi import SerialComm, ShardedAdamW, UsageError, cross_entropy, ops, save
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.compat.accumulation import GradAccum
from zero_mpi.nn import CrossEntropy
from zero_mpi.ops import low_precision, reference
from zero_mpi.ops.block_kinds import BLOCK_KINDS
from zero_mpi.ops.registry import OPERATIONS, VERSIONS, definitions
from zero_mpi.sharding.precision import (
    FIRST_EXPONENT,
    FP16,
    FP64,
    GROWTH_STEPS,
    MAX_EXPONENT,
    LossScale,
    precision_named,
)

KINDS = [ml_dtypes.bfloat16, np.float16]
ops.prepare()


def drawn(kind, *shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32).astype(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_float32_rounded_once(kind):
    x, w, b = drawn(kind, 5, 7), drawn(kind, 3, 7), drawn(kind, 3)
    exactly = x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64)
    y = ops.linear(x, w, b)
    assert y.dtype == kind
    half_a_place = 2.0 ** (-8 if kind is ml_dtypes.bfloat16 else -11)
    np.testing.assert_allclose(y.astype(np.float64), exactly, rtol=half_a_place, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("into", [None, np.float32])
def test_gradients_are_added_in_their_own_type(kind, into):
    dy, x = drawn(kind, 6, 4), drawn(kind, 6, 5)
    dw = drawn(into or kind, 4, 5)
    expected = dw.astype(np.float32) + dy.astype(np.float32).T @ x.astype(np.float32)
    ops.linear_backward_w(dy, x, dw)
    np.testing.assert_allclose(dw.astype(np.float32), expected, rtol=1e-6 if into else 1e-2)
    assert dw.dtype == (into or kind)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_losses_stay_wide(kind):
    x, w = drawn(kind, 4, 8), drawn(kind, 8)
    y, r = ops.rms_norm(x, w, 1e-5)
    assert (y.dtype, r.dtype) == (kind, np.float32)
    loss, dx = ops.linear_cross_entropy(x, drawn(kind, 9, 8), None, np.array([0, 3, 8, 1]), 0.25)
    assert (np.dtype(type(loss)), dx.dtype) == (np.float64, kind)


def test_adamw_rounds_what_it_wrote():
    p, g = drawn(np.float32, 4096), drawn(np.float32, 4096)
    m, v, low = np.zeros_like(p), np.zeros_like(p), np.zeros(4096, ml_dtypes.bfloat16)
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": np.zeros(4), "step": 1}
    ops.adamw(p, g, m, v, grad_scale=1.0, low=low, **rates)
    np.testing.assert_array_equal(low, p.astype(ml_dtypes.bfloat16))


BF = np.dtype(ml_dtypes.bfloat16)


def test_kernels_round_as_the_definition_does():
    """Every bfloat16 is unchanged; a float32 is rounded to nearest, ties to even."""
    jit = pytest.importorskip("zero_mpi.ops.cpu.jit")

    @jit.kernel("e1 e1+")
    def copied(x, y):
        for i in range(x.size):
            y[i] = jit.narrow(y, jit.wide(x[i]))

    @jit.kernel("f1 l1+")
    def rounded(x, y):
        for i in range(x.size):
            y[i] = jit.narrow(y, x[i])

    patterns = np.arange(1 << 16, dtype=np.uint16)
    back = np.zeros_like(patterns)
    copied(patterns, back)
    is_nan = np.isnan(patterns.view(BF).astype(np.float32))
    np.testing.assert_array_equal(back[~is_nan], patterns[~is_nan])
    assert np.isnan(back.view(BF)[is_nan].astype(np.float32)).all()
    halves = np.arange(1 << 17, dtype=np.uint32) << 15  # every bfloat16 and the midpoints between them
    near = np.concatenate([halves, halves + 1, halves - 1]).view(np.float32)
    actual = np.zeros(near.size, np.uint16)
    rounded(near, actual)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = near.astype(BF)
    fine = ~np.isnan(near)
    np.testing.assert_array_equal(actual[fine], expected.view(np.uint16)[fine])
    assert np.isnan(actual.view(BF)[~fine].astype(np.float32)).all()


X, GATE, W, B = drawn(BF, 5, 33, 48), drawn(BF, 33, 48), drawn(BF, 48), drawn(BF, 1, 48)[0]
TOKENS = np.random.default_rng(0).integers(33, size=(5, 33))  # ids; most of them occur several times
ANGLES = np.linspace(0, 9, 33 * 12, dtype=np.float32).reshape(33, 12)


def added(operation, *arguments, kind):
    dw = np.ones((33, 48), kind)
    operation(*arguments, dw)
    return dw


CALLS = {
    "add": lambda o: o.add(X, X[::-1]),
    "scale": lambda o: [o.scale(X, 0.3), o.scale(X, 0.3, X[::-1])],
    "gelu": lambda o: o.gelu(X),
    "gelu_backward": lambda o: o.gelu_backward(X[::-1], X),
    "swiglu": lambda o: o.swiglu(X, X[::-1]),
    "geglu": lambda o: o.geglu(X, X[::-1]),
    "geglu_backward": lambda o: o.geglu_backward(X[:, ::-1], X, X[::-1]),
    "swiglu_backward": lambda o: o.swiglu_backward(X[:, ::-1], X, X[::-1]),
    "rms_norm": lambda o: o.rms_norm(X, W, 1e-5),
    "layer_norm": lambda o: o.layer_norm(X, W, B, 1e-5),
    "embedding_backward": lambda o: [
        added(o.embedding_backward, TOKENS, X, kind=kind) for kind in (BF, np.float32)
    ],
    "positions": lambda o: o.positions(X, GATE),
    "positions_backward": lambda o: [
        added(o.positions_backward, X[:, ::-1], kind=kind) for kind in (BF, np.float32)
    ],
    "rope": lambda o: [
        o.rope(X.reshape(5, 33, 2, 24), np.cos(ANGLES), np.sin(ANGLES), flag) for flag in (True, False)
    ],
}


def norm_backwards(o, kind):
    results = []
    for plus in (None, X[::-1].copy()):
        dw, db = np.ones(48, kind), np.ones(48, kind)
        r = reference.rms_norm(X.astype(np.float32), np.float32(1), 1e-5)[1]
        mean = X.astype(np.float32).mean(axis=-1, keepdims=True)
        results += [o.rms_norm_backward(X[:, ::-1], X, W, r, dw, plus), dw.copy()]
        results += [o.layer_norm_backward(X[:, ::-1], X, W, mean, r, dw, db, plus), dw, db]
    return results


def by_signature(o, name):
    arguments = misfits.in_low_precision(name, misfits.fitting(C=48)[name])
    result = getattr(o, name)(*arguments.values())
    outputs = [arguments[entry.name] for entry in OPERATIONS[name].signature.entries if entry.written]
    results = result if isinstance(result, tuple) else (result,)
    return [x for x in (*results, *outputs) if x is not None]


ELSEWHERE = {"rms_norm_backward", "layer_norm_backward", "causal_attention", "causal_attention_backward"}
ELSEWHERE |= {name for name in OPERATIONS if name.startswith("linear")}  # tested in test_onednn.py
ELSEWHERE |= OPERATIONS.keys() - VERSIONS.get(np.ndarray, OPERATIONS).keys()
ELSEWHERE |= {
    name for name, version in VERSIONS.get(np.ndarray, {}).items() if getattr(version, "native", None) == ()
}
CALLS |= {
    name: lambda o, name=name: by_signature(o, name)
    for name in low_precision.SIGNATURES.keys() - CALLS.keys() - ELSEWHERE
}
CALLS |= {
    f"norm_backward, {np.dtype(kind)}": lambda o, kind=kind: norm_backwards(o, kind)
    for kind in (BF, np.float32)
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_of_bfloat16_do_what_is_defined(name):
    """A kernel's last bit may differ only if a float32 is near the midpoint of two bfloat16 numbers."""
    pytest.importorskip("numba")
    out, expected = CALLS[name](ops), CALLS[name](definitions)
    pairs = [(out, expected)] if isinstance(out, np.ndarray) else list(zip(out, expected, strict=True))
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        a, b = ours.astype(np.float32), theirs.astype(np.float32)
        tolerance = 2.0**-7 if ours.dtype == BF else 2.0**-18
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-6 if ours.dtype == BF else 1e-5)
        assert ours.dtype != BF or np.mean(a != b) < (0.1 if name.startswith("gelu") else 0.002)


def attention_and_errors(q, k, v, dy, scale):
    """Return [(y, error), (dq, error), ...] of one head in float64; error: bound of the rounding errors.

    A rounded bfloat16 has a relative error of at most 2^-8. All other bounds follow from this bound.
    """
    q, k, v, dy = (x.astype(np.float64) for x in (q, k, v, dy))
    scores = scale * q @ k.T
    scores[np.triu_indices(len(scores), 1)] = -np.inf
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dp = dy @ v.T
    ds = p * (dp - (p * dp).sum(1, keepdims=True))
    e = 2.0**-8
    along = e * p * (p * abs(dp)).sum(1, keepdims=True)
    of_ds = e * (2 + e) * abs(ds) + (1 + e) ** 2 * along  # bound of the errors of rounding p, ds and the sum
    pairs = [(p @ v, e * p @ abs(v)), (scale * ds @ k, scale * of_ds @ abs(k))]
    pairs += [(scale * ds.T @ q, scale * of_ds.T @ abs(q)), (p.T @ dy, e * p.T @ abs(dy))]
    return [(x, error + e * (abs(x) + error) + 1e-5) for x, error in pairs]  # the results are rounded too


@pytest.mark.parametrize(
    ("batch", "length", "heads", "shared", "width"),
    [(2, 70, 4, 2, 32), (1, 400, 1, 1, 24), (1, 1, 2, 1, 8), (3, 256, 12, 3, 16), (1, 1100, 3, 1, 8)],
)
def test_attention_of_bfloat16_is_what_is_defined_but_for_the_rounding_of_weights(
    batch, length, heads, shared, width
):
    """The cases cover kept and recomputed weights, a single position, several tiles, and shared keys."""
    pytest.importorskip("numba")
    joint = drawn(BF, batch, length, (heads + 2 * shared) * width)
    q, k, v = (
        part.reshape(batch, length, -1, width)
        for part in np.split(joint, [heads * width, (heads + shared) * width], axis=-1)
    )
    dy = drawn(BF, batch, length, heads, width)
    y, stats = ops.causal_attention(q, k, v, width**-0.5)
    ours = (y, *ops.causal_attention_backward(dy, q, k, v, stats, width**-0.5))
    assert {x.dtype for x in ours} == {np.dtype(BF)}
    group = heads // shared
    for b, g in np.ndindex(batch, shared):
        heads_of_g = range(g * group, (g + 1) * group)
        results = [
            attention_and_errors(q[b, :, h], k[b, :, g], v[b, :, g], dy[b, :, h], width**-0.5)
            for h in heads_of_g
        ]
        for h, (of_y, of_dq, _, _) in zip(heads_of_g, results, strict=True):
            for actual, (expected, error) in zip((y[b, :, h], ours[1][b, :, h]), (of_y, of_dq), strict=True):
                assert (abs(actual.astype(np.float64) - expected) <= error).all()
        for actual, place in ((ours[2], 2), (ours[3], 3)):
            expected, error = (sum(head[place][i] for head in results) for i in (0, 1))
            assert (abs(actual[b, :, g].astype(np.float64) - expected) <= error).all()


def test_kernels_compute_bfloat16_without_widening_it(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(low_precision, "run_low", lambda *arguments: pytest.fail("it was widened"))
    for name in set(CALLS) - {"norm_backward, float32"}:
        CALLS[name](ops)


def test_numbers_that_are_not_finite_stay_so():
    odd = np.array([np.inf, -np.inf, np.nan, 1, 3e38], np.float32).astype(BF)
    assert np.isnan(ops.rms_norm(odd[None], np.ones(5, BF), 1e-5)[0].astype(np.float32)).any()
    assert np.isnan(ops.add(odd, odd[::-1]).astype(np.float32)).sum() == 1
    assert np.isinf(ops.add(odd, odd).astype(np.float32)).sum() == 3, "2 x 3e38 is infinite"
    huge = np.full((2, 4), 1e30, np.float32)  # the square overflows; the gradient's norm shows this
    assert not ops.rms_norm.registry[object](huge, np.ones(4, np.float32), 1e-5)[0].any()


@pytest.mark.parametrize("name", ["llama", "gpt2 tied", "qwen3"])
def test_a_gradient_in_float64_is_the_slope_of_the_whole_model(name):
    config = tiny.MODELS[name]
    module, batch = tiny.make(SerialComm(), config, precision=FP64), tiny.micro_batch(0, 0, config)
    module.forward_backward(*batch, 0.1)
    module.sync_gradients()
    before = module.state_dict()
    ways = {n: np.random.default_rng(7).standard_normal(x.shape) for n, x in before.items()}
    actual = sum(np.vdot(g, ways[n].reshape(-1)) for n, g in module.named_gradients())
    module.zero_gradients()

    def at(t):
        module.load_state_dict({n: x + t * ways[n] for n, x in before.items()})
        return module.evaluate(*batch, 0.1)

    h = 1e-4
    slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    assert slope == pytest.approx(actual, rel=1e-7)
    assert {x.dtype for x in before.values()} == {np.dtype(np.float64)}


def test_float64_has_float64_states_and_goes_where_it_can(tmp_path):
    module = tiny.make(SerialComm(), tiny.MODELS["llama"], precision=FP64)
    optimizer = ShardedAdamW(module, ema=0.9)
    kinds = {x.dtype for states in optimizer.states.values() for x in states.values()}
    assert kinds | {x.dtype for x in optimizer.averages().values()} == {np.dtype(np.float64)}
    with pytest.raises(UsageError, match="ema"):
        save(tmp_path / "c", module, optimizer)
    kind = {"output.weight": BLOCK_KINDS["Q8_0"]}
    with pytest.raises(UsageError, match="--precision fp64"):
        tiny.make(SerialComm(), tiny.MODELS["llama"], precision=FP64, stored=kind, frozen=["output.weight"])
    with pytest.raises(UsageError, match="--reduce-dtype fp32"):
        precision_named("fp64", "fp32")


def test_the_scale_halves_and_grows():
    scale = LossScale(dynamic=True)
    assert scale.factor == 2.0**FIRST_EXPONENT
    scale.update(finite=False)
    assert scale.factor == 2.0 ** (FIRST_EXPONENT - 1)
    for _ in range(GROWTH_STEPS):
        scale.update(finite=True)
    assert (scale.exponent, scale.good_steps) == (FIRST_EXPONENT, 0)
    for _ in range(GROWTH_STEPS * (MAX_EXPONENT + 3)):
        scale.update(finite=True)
    assert scale.exponent == MAX_EXPONENT
    for _ in range(MAX_EXPONENT + 3):
        scale.update(finite=False)
    assert scale.factor == 1.0
    still = LossScale(dynamic=False)
    still.update(finite=False)
    assert (still.factor, still.good_steps) == (1.0, 0)


def test_a_step_that_overflows_is_left_out_and_halves_the_scale():
    config = tiny.MODELS["llama"]
    module = tiny.make(SerialComm(), config, precision=FP16)
    optimizer, accumulator = ShardedAdamW(module, lr=1e-2), GradAccum(module, 1)
    module.loss_scale.exponent = 100  # far beyond the range of float16
    before = tiny.digest(module.state_dict())
    tiny.run_step(module, accumulator, config, 0, 1)
    result = optimizer.step(max_norm=1.0)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert module.loss_scale.exponent == 99
    assert tiny.digest(module.state_dict()) == before


def test_a_loss_that_is_a_function_keeps_small_gradients_in_fp16():
    config, norms = tiny.MODELS["llama"], []
    x, targets = tiny.micro_batch(0, 0, config)
    for criterion in (partial(cross_entropy, targets=targets, scale=1e-6), CrossEntropy(targets, 1e-6)):
        module = tiny.make(SerialComm(), config, precision=FP16)
        GradAccum(module, 1).accumulate(x, criterion)
        norms.append(module.gradient_norm())
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


SMALL = "--layers 1 --dim 16 --heads 2 --context 16 --batch-size 4 --sample 0 --eval-windows 4 --warmup 2"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("all the words that a small model needs to see, and some more of them\n" * 60)
    return path


def train(out, text, *flags, ranks=1):
    args = ["-m", "zero_mpi.train", "--out", out, "--data", text, *SMALL.split(), *flags]
    return run_job(ranks, args, timeout=100)


def losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [(record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]


@pytest.mark.parametrize("precision", ["fp16", "fp64"])
def test_a_run_in_another_precision_goes_on_with_its_bits(tmp_path, text, precision):
    full, parts = tmp_path / "whole", tmp_path / "parts"
    status, _, errors = train(full, text, "--precision", precision, "--steps", "5")
    assert status == 0, errors
    for steps, ranks in (("3", 2), ("5", 1)):
        status, out, errors = train(parts, text, "--precision", precision, "--steps", steps, ranks=ranks)
        assert status == 0, out + errors
    assert losses(parts)[3:] == losses(full)[3:]
    if precision == "fp64":
        status, out, errors = run_job(2, ["-m", "zero_mpi", "verify", parts], timeout=100)
        assert status == 0, out + errors
        one, other = (GGUFFile.open(folder / "step-00000005" / "optimizer.gguf") for folder in (full, parts))
        assert one.metadata["training.state_digest"] == other.metadata["training.state_digest"]
        return
    first, second = (
        GGUFFile.open(folder / "step-00000005" / "optimizer.gguf").metadata for folder in (full, parts)
    )
    for key in ("training.loss_scale_exponent", "training.loss_scale_steps"):
        assert first[key] == second[key]
    assert first["training.loss_scale_steps"] == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--precision bf16 --reduction fast --transport mpi", "--reduce-dtype fp32"),
        ("--precision fp64 --ema 0.9", "--precision fp64"),
        ("--precision fp64 --lora 2 --init model.gguf", "--precision fp64"),
        ("--device cuda", "--device cuda"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, text, flags, words):
    status, _, errors = train(tmp_path / "run", text, "--steps", "1", *flags.split(), ranks=2)
    assert status == 2
    assert words in errors
    assert len(errors.strip().splitlines()) == 1
