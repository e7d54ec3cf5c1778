"""Documents in a row are independent; each has the loss and gradients of a separate row."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tiny

from zero_mpi import GradAccum, SerialComm, ShardedAdamW, cross_entropy, ops
from zero_mpi.arguments import UNCOUNTED
from zero_mpi.device.arrays import RECYCLED
from zero_mpi.nn import Cache, CausalAttention, CrossEntropy, Packed
from zero_mpi.nn.batch import BatchContext, Documents, StageWeights
from zero_mpi.nn.loss import ROW_STEPS
from zero_mpi.ops import reference
from zero_mpi.ops.cpu import attention, attention_bf16
from zero_mpi.sharding.precision import BF16, FP32


def documents_of(begins):
    return Documents(Packed(np.ones_like(begins), begins))


CONTEXT, CUTS = 150, (0, 70, 73, 130)  # longer than a block of queries or keys; one document has three tokens
MODELS = {
    name: replace(config, context_length=CONTEXT) for name, config in (tiny.MODELS | tiny.OTHERS).items()
}
every_model = pytest.mark.parametrize("name", MODELS)


def begins_of(cuts=CUTS, rows=2, length=CONTEXT):
    cuts, places = np.array(cuts), np.arange(length)
    row = cuts[np.searchsorted(cuts, places, side="right") - 1]
    return np.tile(row, (rows, 1)).astype(np.int64)


def documents(begins):
    return [
        np.s_[row : row + 1, start : start + (begins[row] == start).sum()]
        for row in range(len(begins))
        for start in np.unique(begins[row])
    ]


def drawn(rows=2, length=CONTEXT, seed=0):
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(61, size=(2, rows, length))
    targets[rng.random(targets.shape) < 0.5] = UNCOUNTED
    return ids, targets


@every_model
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda p: p.compute.name)
def test_another_text_before_it_moves_no_bit_of_a_document(name, precision, recompute):
    module = tiny.make(SerialComm(), MODELS[name], precision=precision, recompute=recompute)
    (ids, _), begins = drawn(), begins_of()
    first = module.forward(Packed(ids, begins), training=False).copy()
    other = ids.copy()
    other[:, :70] = drawn(seed=1)[0][:, :70]
    second = module.forward(Packed(other, begins), training=False)
    assert first[:, 70:].tobytes() == second[:, 70:].tobytes()
    assert (first[:, :70] != second[:, :70]).any(axis=(0, 2)).all(), "the first documents must differ"


def gradients(module):
    module.sync_gradients()
    return {name: np.array(gradient, np.float64) for name, gradient in module.gradients()}


@every_model
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_gradients_are_those_of_each_document_alone(name, recompute):
    """The tolerance is 1e-6 of the largest value, and at least 1e-6, because the summation order differs."""
    ids, targets = drawn()
    begins, scale = begins_of(), 1 / (targets != UNCOUNTED).sum()
    module = tiny.make(SerialComm(), MODELS[name], recompute=recompute)
    loss = GradAccum(module, 1).accumulate(Packed(ids, begins), CrossEntropy(targets, scale))
    packed = gradients(module)
    module.zero_gradients()
    parts = documents(begins)
    accumulator = GradAccum(module, len(parts))
    total = sum(accumulator.accumulate(ids[part], CrossEntropy(targets[part], scale)) for part in parts)
    assert loss == pytest.approx(total, rel=1e-6)
    for unit, expected in gradients(module).items():
        np.testing.assert_allclose(packed[unit], expected, rtol=0, atol=1e-6 * max(1, abs(expected).max()))
    assert module.evaluate(Packed(ids, begins), targets, scale) == pytest.approx(total, rel=1e-6)


SHAPES = [(150, 4, 2, 8, 6), (50, 3, 1, 8, 8), (129, 2, 2, 5, 3), (300, 4, 4, 16, 16)]  # T, H, K, D, E


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", [np.float64, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_that_of_each_document_alone(monkeypatch, shape, kind, keep):
    for module in (attention, attention_bf16):
        monkeypatch.setattr(module, "KEPT_WEIGHTS", 1 << 40 if keep else 0)
    length, heads, kv, width, tall = shape
    rng = np.random.default_rng(0)
    sizes = ((heads, width), (kv, width), (kv, tall), (heads, tall))
    q, k, v, dy = (rng.standard_normal((3, length, *size)).astype(kind) for size in sizes)
    rows = (0,), (0, 5, 6, length // 2), range(length)
    begins = np.concatenate([begins_of(cuts, 1, length) for cuts in rows])
    y, stats = ops.causal_attention(q, k, v, 0.4, begins)
    results = y, *ops.causal_attention_backward(dy, q, k, v, stats, 0.4)
    exact = [x.astype(np.float64) for x in (q, k, v, dy)]
    tolerance = {8: 1e-12, 4: 5e-6, 2: 0.05}[np.dtype(kind).itemsize]
    for part in documents(begins):
        arrays = [x[part] for x in exact]
        expected, p = reference.causal_attention(*arrays[:3], 0.4)
        truths = expected, *reference.causal_attention_backward(arrays[3], *arrays[:3], p, 0.4)
        for ours, truth in zip(results, truths, strict=True):
            np.testing.assert_allclose(ours[part].astype(np.float64), truth, rtol=0, atol=tolerance)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_a_window_is_what_a_position_sees(monkeypatch, kind, keep):
    """The attention window applies in training, in packed documents, and when a text is read in chunks."""
    for module in (attention, attention_bf16):
        monkeypatch.setattr(module, "KEPT_WEIGHTS", 1 << 40 if keep else 0)
    length, window, rng = 300, 140, np.random.default_rng(0)
    sizes = (4, 8), (2, 8), (2, 6), (4, 6)
    q, k, v, dy = (rng.standard_normal((2, length, *size)).astype(kind) for size in sizes)
    layer, tolerance = CausalAttention(0.4, window), {8: 1e-12, 4: 5e-6, 2: 0.05}[np.dtype(kind).itemsize]
    exact = [x.astype(np.float64) for x in (q, k, v, dy)]
    for cuts in (CUTS, (0,)):
        begins = begins_of(cuts, 2, length)
        first = np.maximum(begins, np.arange(length) - window + 1)
        expected, p = reference.causal_attention(*exact[:3], 0.4, first)
        truths = expected, *reference.causal_attention_backward(exact[3], *exact[:3], p, 0.4)
        p = StageWeights({}, BatchContext(documents_of(begins) if len(cuts) > 1 else None))
        y, saved = layer.forward(p, (q, k, v))
        results = y, *layer.backward(p, saved, dy, {})
        for ours, truth in zip(results, truths, strict=True):
            np.testing.assert_allclose(ours.astype(np.float64), truth, rtol=0, atol=tolerance)
    cache = Cache()
    for start, stop in ((0, 150), (150, 151), (151, 300)):
        y = layer.infer({}, tuple(x[:, start:stop] for x in (q, k, v)), cache)
        np.testing.assert_allclose(np.float64(y), expected[:, start:stop], rtol=0, atol=tolerance)
        cache.position = stop


@pytest.mark.parametrize("kind", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_a_target_that_does_not_count_has_no_loss_and_no_gradient(kind):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 9, 7)), rng.standard_normal((11, 7))
    targets = rng.integers(11, size=(2, 9))
    x, w = x.astype(kind), w.astype(kind)
    targets[:, ::3] = UNCOUNTED
    counts, dw, expected = targets != UNCOUNTED, np.zeros(w.shape, kind), np.zeros(w.shape, kind)
    loss, dx = ops.linear_cross_entropy(x, w, None, targets, 0.1, dw)
    expected_loss, expected_dx = ops.linear_cross_entropy(x[counts], w, None, targets[counts], 0.1, expected)
    close = {8: 1e-12, 4: 1e-5, 2: 0.05}[np.dtype(kind).itemsize]
    assert loss == pytest.approx(expected_loss, rel=close)
    assert not dx[~counts].any()
    np.testing.assert_allclose(np.float64(dx[counts]), np.float64(expected_dx), atol=close)
    np.testing.assert_allclose(np.float64(dw), np.float64(expected), atol=close)
    logits = rng.standard_normal((2, 9, 11)).astype(kind)
    loss, dlogits = ops.cross_entropy(logits, targets, 0.1)
    assert loss == pytest.approx(ops.cross_entropy(logits[counts], targets[counts], 0.1)[0], rel=close)
    assert not dlogits[~counts].any()
    assert dlogits[counts].any(axis=-1).all()


def test_without_a_scale_the_mean_is_over_what_counts():
    logits, targets = np.random.default_rng(0).standard_normal((4, 5)), np.array([1, UNCOUNTED, 2, UNCOUNTED])
    loss, _ = cross_entropy(logits, targets)
    assert loss == pytest.approx(cross_entropy(logits[[0, 2]], targets[[0, 2]])[0], rel=1e-14)
    assert cross_entropy(logits, np.full(4, UNCOUNTED))[0] == 0
    with pytest.raises(ValueError, match=r"from 0 to 4, .*-1"):
        cross_entropy(logits, np.array([1, -2, 2, 0]))


def test_a_step_allocates_nothing_large_though_documents_differ():
    module = tiny.make(SerialComm(), MODELS["llama"])
    optimizer, accumulator = ShardedAdamW(module), GradAccum(module, 1)
    rng, fresh = np.random.default_rng(0), []
    for step in range(40):
        ids, _ = drawn(8, seed=step)
        share = step % ROW_STEPS / ROW_STEPS if step < 2 * ROW_STEPS else rng.random()
        targets = np.where(rng.permutation(ids.size) <= share * ids.size, 7, UNCOUNTED).reshape(ids.shape)
        cuts = np.unique(np.append(0, rng.integers(CONTEXT, size=rng.integers(1, 9))))
        accumulator.accumulate(Packed(ids, begins_of(cuts, 8)), CrossEntropy(targets, 1e-3))
        optimizer.step()
        fresh.append(RECYCLED.nbytes)
    assert fresh[-1] == fresh[2 * ROW_STEPS], "memory must not grow"
