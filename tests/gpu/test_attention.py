"""Attention on the GPU, by cuDNN and by the package's kernels, matches its definition.

On the simulated device, cuDNN's graphs are simulated too (tests/pretend/cudnn). The last test checks that
the real cudnn-frontend accepts graphs like the package's, if it is installed.
"""

import sys

import numpy as np
import pytest
from test_products import KINDS, LOW, ask_the_real, defined, draw, kinds

from zero_mpi import ops
from zero_mpi.device.arrays import address, pool_of, side_by_side
from zero_mpi.errors import UsageError
from zero_mpi.ops import sizes

#           B  T  S  H  K  D   E
SHAPES = [(1, 1, 1, 1, 1, 8, 8), (2, 7, 7, 4, 2, 16, 16), (1, 33, 33, 6, 6, 8, 8), (3, 20, 20, 4, 1, 32, 32)]
OTHER = [(2, 1, 9, 4, 2, 8, 8), (1, 5, 12, 2, 2, 16, 16), (2, 6, 6, 2, 1, 5, 3), (1, 9, 11, 3, 3, 7, 12)]
# cuDNN always has plans for these shapes.
TAKEN = [(2, 64, 64, 4, 2, 64, 64), (1, 128, 128, 3, 3, 128, 128)]
pytestmark = pytest.mark.world(1)  # a single process


def case(kind, shape, seed=0):
    b, t, s, h, kv, d, e = shape
    shapes = [(b, t, h, d), (b, s, kv, d), (b, s, kv, e), (b, t, h, e)]
    return [draw(kind, *shape, seed=seed + i) for i, shape in enumerate(shapes)]


def near(actual, expected, kind):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    largest = np.abs(expected).max(initial=0.0)
    allowed = 1e-5 * (1 + largest) if kind == "f32" else LOW[kind] * (np.abs(expected) + largest + 0.5)
    assert (np.abs(actual - expected) <= allowed).all(), (np.abs(actual - expected).max(), largest)


@pytest.fixture
def take_way(monkeypatch):
    return lambda way: monkeypatch.setenv("ZERO_MPI_GPU_ATTENTION", way)


def cudnn_or_skip():
    from zero_mpi.ops.gpu.sdpa import sdpa

    library, why_not = sdpa()
    if library is None:
        pytest.skip(f"cuDNN cannot be used: {why_not}")
    return library


def both(gpu, arrays, scale=0.3):
    q, k, v, dy = (gpu.from_host(x) if isinstance(x, np.ndarray) else x for x in arrays)
    y, stats = ops.causal_attention(q, k, v, scale)
    return [gpu.to_host(x) for x in (y, *ops.causal_attention_backward(dy, q, k, v, stats, scale))]


def wanted(arrays, scale=0.3):
    q, k, v, dy = arrays
    y, p = defined("causal_attention")(q, k, v, scale)
    return [y, *defined("causal_attention_backward")(dy, q, k, v, p, scale)]


def check(gpu, kind, shape, scale=0.3):
    arrays = case(kind, shape)
    for actual, expected in zip(both(gpu, arrays, scale), wanted(arrays, scale), strict=True):
        assert actual.dtype == KINDS[kind]
        near(actual, expected, kind)


@pytest.fixture(params=["own", "auto"])
def way(request, gpu, take_way):
    if request.param == "auto":
        cudnn_or_skip()
    take_way(request.param)
    return request.param


@kinds
@pytest.mark.parametrize("shape", SHAPES + OTHER, ids=str)
def test_attention(gpu, way, kind, shape):
    check(gpu, kind, shape)


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_documents_in_a_row_do_not_see_each_other(gpu, take_way, kind, shape, monkeypatch):
    """Packed documents are computed in blocks of queries, without cuDNN."""
    take_way("auto")
    b, t, _, heads, *_ = shape
    monkeypatch.setattr(sizes, "SCORES", 4 * b * heads * sizes.scores_across(t) * 7)
    arrays = case(kind, shape)
    begins = np.sort(np.random.default_rng(0).integers(t, size=(b, t)), axis=1)
    begins = np.minimum(begins // 5 * 5, np.arange(t) // 5 * 5)
    q, k, v, dy = map(gpu.from_host, arrays)
    y, stats = ops.causal_attention(q, k, v, 0.3, gpu.from_host(begins))
    results = y, *ops.causal_attention_backward(dy, q, k, v, stats, 0.3)
    q, k, v, dy = arrays
    expected, p = defined("causal_attention")(q, k, v, 0.3, begins)
    others = defined("causal_attention_backward")(dy, q, k, v, p, 0.3)
    for actual, truth in zip(results, (expected, *others), strict=True):
        near(gpu.to_host(actual), truth, kind)


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("shape", TAKEN, ids=str)
def test_cudnn(gpu, take_way, kind, shape):
    cudnn_or_skip()
    take_way("cudnn")
    check(gpu, kind, shape, 0.125)


@pytest.mark.parametrize("kind", LOW)
def test_cudnn_is_taken_for_what_it_can_do(gpu, take_way, kind):
    cudnn, count = cudnn_or_skip(), lambda: len(cudnn.graphs)
    take_way("auto")
    others = (OTHER[0], OTHER[2], (1, 4, 4, 2, 2, 512, 512))
    for shape, uses in ((TAKEN[0], True), *((shape, False) for shape in others)):
        cudnn.graphs.clear()
        both(gpu, case(kind, shape))
        assert count() == (2 if uses else 0), shape  # forward and backward
        both(gpu, case(kind, shape, seed=7))
        assert count() == (2 if uses else 0)
    cudnn.graphs.clear()
    both(gpu, case("f32", TAKEN[0]))
    take_way("own")
    both(gpu, case(kind, TAKEN[0]))
    assert count() == 0


@kinds
def test_heads_are_read_and_written_as_columns_of_one_array(gpu, way, kind):
    b, t, h, kv, d = 2, 9, 4, 2, 16
    joint, dy = draw(kind, b, t, (h + 2 * kv) * d), draw(kind, b, t, h, d, seed=1)

    def split(x):
        parts = np.split(np.arange(x.shape[-1]), [h * d, (h + kv) * d])
        return [x[..., part[0] : part[-1] + 1].reshape(b, t, -1, d) for part in parts]

    q, k, v = split(gpu.from_host(joint))
    y, stats = ops.causal_attention(q, k, v, 0.25)
    gradients = ops.causal_attention_backward(gpu.from_host(dy), q, k, v, stats, 0.25)
    array = side_by_side(gradients)
    assert array is not None
    assert address(array) == address(gradients[0])
    truths = wanted([*split(joint), dy], 0.25)
    for actual, expected in zip([y, *gradients], truths, strict=True):
        near(gpu.to_host(actual), expected, kind)
    near(gpu.to_host(array)[..., : h * d], truths[1].reshape(b, t, -1), kind)


@kinds
@pytest.mark.parametrize("shape", [(2, 45, 45, 4, 2, 8, 8), (1, 40, 60, 2, 1, 8, 4)], ids=str)
def test_long_sequences_go_in_blocks(gpu, take_way, kind, shape, monkeypatch):
    from zero_mpi.ops.gpu import attention

    take_way("own")
    arrays = case(kind, shape)
    full = both(gpu, arrays)
    of_shapes = attention.sizes_of(*arrays[:3])
    row = 4 * of_shapes.groups * of_shapes.per_key * of_shapes.across
    for rows in (1, 7, 16, 20):
        monkeypatch.setattr(sizes, "SCORES", rows * row)
        parts = list(attention.blocks(of_shapes))
        assert len(parts) == -(-of_shapes.length // min(rows, 16))
        assert parts[0][0] + parts[0][1] == of_shapes.length
        assert parts[0][2] == of_shapes.total
        results = both(gpu, arrays)
        for actual, expected, once in zip(results, wanted(arrays), full, strict=True):
            near(actual, expected, kind)
            near(actual, once, kind)


@kinds
def test_two_runs_have_the_same_bits(gpu, way, kind, monkeypatch):
    monkeypatch.setattr(sizes, "SCORES", 1 << 15)
    arrays = case(kind, (2, 65, 65, 4, 2, 16, 16))
    first, second = both(gpu, arrays), both(gpu, arrays)
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]


@kinds
def test_a_step_makes_nothing_new_after_the_first_two(gpu, way, kind):
    from zero_mpi.ops.gpu import gemm

    arrays = [gpu.from_host(x) for x in case(kind, (2, 64, 64, 4, 2, 32, 32))]

    def state():
        gpu.synchronize()
        graphs = cudnn_or_skip().graphs if way == "auto" else ()
        pool = gpu.cupy.get_default_memory_pool()
        return len(gemm.products().plans), pool_of(gpu).nbytes, pool.total_bytes(), len(graphs)

    for _ in range(2):
        both(gpu, arrays)
    before = state()
    for _ in range(3):
        both(gpu, arrays)
    assert state() == before


def test_what_is_no_number_stays_visible(gpu, take_way):
    take_way("own")
    for kind in KINDS:
        q, k, v, dy = case(kind, (1, 6, 6, 1, 1, 8, 8))
        k[0, 2, 0, 0] = np.nan
        y, dq, *_ = both(gpu, (q, k, v, dy))
        assert np.isnan(y[0, 2:].astype(np.float32)).all()
        assert np.isfinite(y[0, :2].astype(np.float32)).all()
        assert np.isnan(dq[0, 2:].astype(np.float32)).all()


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_own_kernels_go_on_where_cudnn_has_no_plan(gpu, take_way, kind, part, monkeypatch):
    cudnn_or_skip()
    from zero_mpi.ops.gpu.sdpa import Sdpa

    monkeypatch.setattr(Sdpa, part, lambda *_: False)
    take_way("auto")
    check(gpu, kind, TAKEN[0])
    take_way("cudnn")
    with pytest.raises(UsageError, match="no plan"):
        both(gpu, case(kind, TAKEN[0]))


@pytest.fixture
def pretended(gpu, monkeypatch):
    library = cudnn_or_skip()
    if not hasattr(library.cudnn, "refuses"):
        pytest.skip("a real cuDNN cannot refuse a graph, change its version or report the order")
    monkeypatch.setattr(library, "graphs", {})
    monkeypatch.setattr(library, "refusals", [])
    return library


@pytest.mark.parametrize(("version", "limit", "refused"), [(92500, 0, 0), (92400, 0, 1), (92400, 1 << 20, 0)])
def test_a_backward_is_not_cudnns_if_its_memory_grows_with_the_square(
    pretended, take_way, monkeypatch, gpu, version, limit, refused
):
    monkeypatch.setattr(pretended.cudnn, "version", version)
    monkeypatch.setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", str(limit))
    monkeypatch.setattr(pretended, "slopes", limit)
    take_way("auto")
    check(gpu, "bf16", (1, 512, 512, 1, 1, 8, 8))  # scores: 64 KiB if linear in length, 512 KiB if quadratic
    assert len(pretended.refusals) == refused
    assert not refused or "MiB" in pretended.refusals[0]


HEAD = 2 * 64 * 128 * 2  # bytes for 64 positions of the two query heads that share a key/value head


@pytest.mark.parametrize("version", [92400, 92500])
@pytest.mark.parametrize(("heads", "calls"), [(12, 1), (11, 2), (6, 2), (3, 4), (2, 12), (1, 12)])
def test_a_backward_with_many_scores_goes_by_sequences_and_heads(
    pretended, gpu, take_way, monkeypatch, version, heads, calls
):
    """The calls stay within the memory limit, in a fixed order, and together equal one full call."""
    library, limit = pretended, heads * HEAD
    take_way("auto")
    arrays = case("bf16", (4, 64, 64, 6, 3, 16, 16))
    full = both(gpu, arrays)
    monkeypatch.setattr(library.cudnn, "version", version)
    monkeypatch.setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", str(limit))
    monkeypatch.setattr(library, "slopes", limit)
    monkeypatch.setattr(library, "graphs", {})
    executed, built = library.cudnn.calls.executed, library.cudnn.calls.built
    for actual, once in zip(both(gpu, arrays), full, strict=True):
        np.testing.assert_array_equal(actual, once)
    assert library.cudnn.calls.executed - executed == 1 + calls
    assert library.cudnn.calls.built - built == 2
    assert library.refusals == []
    assert library.cudnn.calls.in_order[-1]
    assert sizes.cudnn_group((4, 66, 66, 6), 3, 1) == (4, 3), "log-sum-exps of a part are not aligned"


def test_gradients_may_be_added_in_any_order(pretended, gpu, take_way, monkeypatch):
    from zero_mpi.ops.gpu import attention

    arrays = case("bf16", TAKEN[0])
    for way, ordered in (("any-order", False), ("auto", True), ("any-order", False)):
        monkeypatch.setattr(pretended, "graphs", {})
        take_way(way)
        for actual, expected in zip(both(gpu, arrays), wanted(arrays), strict=True):
            near(actual, expected, "bf16")
        assert pretended.cudnn.calls.in_order[-1] == ordered
        assert ("in any order" in attention.about()) != ordered


def test_the_way_is_a_choice(gpu, take_way, monkeypatch):
    from zero_mpi.ops.gpu import attention, sdpa

    arrays = case("bf16", TAKEN[0])
    take_way("fast")
    with pytest.raises(UsageError, match="auto, own, cudnn, any-order"):
        both(gpu, arrays)
    monkeypatch.setattr(sdpa, "_library", (None, None, ""))
    monkeypatch.setitem(sys.modules, "cudnn", None)
    take_way("cudnn")
    with pytest.raises(UsageError, match="cuDNN cannot be used"):
        both(gpu, arrays)
    take_way("auto")
    assert "own kernels, no cuDNN" in attention.about()
    for actual, expected in zip(both(gpu, arrays), wanted(arrays), strict=True):
        near(actual, expected, "bf16")
    take_way("own")
    assert attention.about() == "attention by own kernels"


REAL = """
import json, cudnn
try:
    g = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=cudnn.data_type.FLOAT,
                      compute_data_type=cudnn.data_type.FLOAT)
except RuntimeError as error:  # older ones want the library for that
    print(json.dumps(str(error)))
    raise SystemExit
def t(name, uid, dim, stride, kind=cudnn.data_type.BFLOAT16):
    return g.tensor(name=name, uid=uid, dim=dim, stride=stride, data_type=kind)
side = [[2, 4, 8, 16], [512, 16, 64, 1]]
q, k, v, o, do = (t(n, u, *side) for u, n in enumerate(("q", "k", "v", "o", "dO"), 1))
stats = t("stats", 6, [2, 4, 8, 1], [32, 8, 1, 1], cudnn.data_type.FLOAT)
y, lse = g.sdpa(q=q, k=k, v=v, attn_scale=0.25, use_causal_mask=True, generate_stats=True)
y.set_output(True).set_dim(side[0]).set_stride(side[1]).set_uid(7)
lse.set_output(True).set_dim([2, 4, 8, 1]).set_stride([32, 8, 1, 1]).set_uid(8)
lse.set_data_type(cudnn.data_type.FLOAT)
found = g.sdpa_backward(q=q, k=k, v=v, o=o, dO=do, stats=stats, attn_scale=0.25, use_causal_mask=True,
                        use_deterministic_algorithm=True)
for uid, d in enumerate(found, 9):
    d.set_output(True).set_dim(side[0]).set_stride(side[1]).set_uid(uid)
def missing(owner, names):
    return [name for name in names.split() if not callable(getattr(owner, name, None))]
names = missing(g, "validate build_operation_graph create_execution_plans check_support build_plans")
names += missing(g, "get_workspace_size execute")
names += missing(cudnn, "create_handle set_stream destroy_handle backend_version")
modes = [cudnn.heur_mode.A.name, cudnn.heur_mode.FALLBACK.name, cudnn.data_type.HALF.name]
print(json.dumps([names, modes, len(found), issubclass(cudnn.cudnnGraphNotSupportedError, Exception)]))
"""


@pytest.mark.timeout_seconds(150)
def test_graphs_are_made_as_the_real_cudnn_frontend_wants(gpu):
    answer = ask_the_real("nvidia-cudnn-frontend", REAL)
    if isinstance(answer, str):
        pytest.skip(f"this cudnn-frontend makes no graph without cuDNN: {answer}")
    missing, modes, outputs, is_error = answer
    assert missing == []
    assert modes == ["A", "FALLBACK", "HALF"]
    assert outputs == 3
    assert is_error
