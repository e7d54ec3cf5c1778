"""Every layer's backward is the derivative of its forward, and every layer keeps the contract of `Layer`."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import architectures
import numpy as np
import pytest

import zero_mpi.models
import zero_mpi.nn
from zero_mpi import nn
from zero_mpi.models import ModelConfig
from zero_mpi.models.lora import TARGETS, LoRA
from zero_mpi.nn.compose import Wrapper
from zero_mpi.nn.layer import AddsInBackward, AddsInForward, Composite
from zero_mpi.nn.linear import observing

STEP = 1e-5  # difference quotient; its error is 1e-16 / STEP from rounding plus STEP^4 from truncation
TOLERANCE = 1e-7

Make = Callable[[np.random.Generator, Any], Any]  # (generator, float type) -> an input
Loss = Callable[[Any], tuple[float, Any]]  # y -> (value, dy)


def real(*shape: int) -> Make:
    return lambda rng, dtype: rng.standard_normal(shape).astype(dtype)


def several(*makers: Make) -> Make:
    return lambda rng, dtype: tuple(make(rng, dtype) for make in makers)


def tokens(vocabulary: int, *shape: int) -> Make:
    return lambda rng, dtype: rng.integers(vocabulary, size=shape)


def qkv(heads: nn.Heads) -> Make:
    return several(
        real(2, 5, heads.query, heads.key_width),
        real(2, 5, heads.kv, heads.key_width),
        real(2, 5, heads.kv, heads.value_width),
    )


@dataclass(frozen=True)
class Case:
    name: str
    layer: nn.Layer
    make: Make
    targets: Make | None = None


GROUPED = nn.Heads(query=6, kv=2, key_width=4, value_width=3)
EQUAL = nn.Heads(query=3, kv=3, key_width=4, value_width=4)
SIZES = {"vocab_size": 11, "context_length": 6, "embedding_length": 12, "feed_forward_length": 17}
SIZES |= {"head_count": 6, "head_count_kv": 3, "key_length": 4, "value_length": 5}
MODELS = architectures.every(SIZES)
LLAMA, QWEN2, GPT = (MODELS[arch] for arch in ("llama", "qwen2", "gpt2"))
ALL = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
BIASED = replace(LLAMA, biases=frozenset(ALL))


def with_adapters(config: ModelConfig, *targets: str) -> ModelConfig:
    return replace(config, lora=LoRA(3, 4.5, targets or TARGETS))


def block(config: ModelConfig) -> nn.Layer:
    return next(stage.layer for stage in config.stages() if stage.scope == "blk.0")


def whole(name: str, config: ModelConfig, recompute: bool = False) -> Case:
    model = nn.Chain(*(stage.layer for stage in config.stages(recompute)))
    vocabulary = config.vocab_size
    return Case(name, model, tokens(vocabulary, 2, 5), tokens(vocabulary, 2, 5))


SEQUENCES = real(2, 5, 7)
BLOCK_INPUT = real(2, 5, 12)
CASES = [
    Case("linear", nn.Linear("a", 7, 3), SEQUENCES),
    Case("linear, bias", nn.Linear("a", 7, 3, bias=True), SEQUENCES),
    Case("embedding", nn.Embedding("a", 4, 7), tokens(4, 2, 5)),
    Case("learned positions", nn.LearnedPositions("a", 8, 7), SEQUENCES),
    Case("learned positions, full", nn.LearnedPositions("a", 5, 7), SEQUENCES),
    Case("rms norm", nn.RMSNorm("a", 7, 1e-3), SEQUENCES),
    Case("layer norm", nn.LayerNorm("a", 7, 1e-3), SEQUENCES),
    Case("gelu", nn.GELU(), SEQUENCES),
    Case("joint swiglu, bias", nn.JointSwiGLU("a", 7, 5, bias=True), SEQUENCES),
    Case("geglu", nn.GeGLU("a", 7, 5), SEQUENCES),
    Case("window", nn.CausalAttention(0.5, 3), qkv(GROUPED)),
    Case("experts", nn.Experts("a", 7, 6, 5, 2, normalized=True), SEQUENCES),
    Case("experts, not normalized", nn.Experts("a", 7, 6, 5, 3, normalized=False), SEQUENCES),
    Case(
        "experts, all, shared",
        nn.Experts("a", 7, 6, 4, 4, normalized=True, shared=nn.Linear("b", 7, 7)),
        SEQUENCES,
    ),
    Case("swiglu, bias", nn.SwiGLU("a", 7, 5, bias=True), SEQUENCES),
    Case("rope, interleaved", nn.RoPE(100.0, interleaved=True), qkv(GROUPED)),
    Case("rope, partial, interleaved", nn.RoPE(100.0, interleaved=True, width=2), qkv(GROUPED)),
    Case("rope, partial", nn.RoPE(100.0, interleaved=False, width=2), qkv(GROUPED)),
    Case("rope, neox", nn.RoPE(100.0, interleaved=False), qkv(GROUPED)),
    Case("rope, magnitude", nn.RoPE(100.0, interleaved=False, magnitude=1.5), qkv(GROUPED)),
    Case("rope, factors", nn.RoPE(100.0, interleaved=False, factors=(0.5, 8.0)), qkv(GROUPED)),
    Case("qk norm", nn.QKNorm("a", 4, 1e-3), qkv(GROUPED)),
    Case("joint qk norm", nn.JointQKNorm("a", GROUPED, 1e-3), qkv(GROUPED)),
    Case("multiply", nn.Multiply(0.3), SEQUENCES),
    Case("attention, grouped", nn.CausalAttention(0.5), qkv(GROUPED)),
    Case("attention, K = H", nn.CausalAttention(0.5), qkv(EQUAL)),
    Case("attention, K = 1", nn.CausalAttention(0.5), qkv(nn.Heads(3, 1, 3, 5))),
    Case("merge heads", nn.MergeHeads(), real(2, 5, 3, 4)),
    Case("project qkv, bias", nn.ProjectQKV("a", 7, GROUPED, bias=True), SEQUENCES),
    Case("joint qkv, bias", nn.JointQKV("a", 7, GROUPED, bias=True), SEQUENCES),
    Case("fused qkv, bias", nn.FusedQKV("a", 7, GROUPED, bias=True), SEQUENCES),
    Case("chain", nn.Chain(nn.Linear("a", 7, 5), nn.GELU(), nn.Linear("b", 5, 2)), SEQUENCES),
    Case("chain, one matrix twice", nn.Chain(nn.Linear("a", 7, 7), nn.Linear("a", 7, 7)), SEQUENCES),
    Case("residual", nn.Residual(nn.Linear("a", 7, 7, bias=True)), SEQUENCES),
    Case("recompute", nn.Recompute(nn.Chain(nn.RMSNorm("a", 7, 1e-3), nn.SwiGLU("b", 7, 3))), SEQUENCES),
    Case("recompute, no parameters", nn.Recompute(nn.GELU()), SEQUENCES),
    Case("recompute, positions", nn.Recompute(nn.LearnedPositions("a", 8, 7)), SEQUENCES),
    Case("llama block, biases", block(BIASED), BLOCK_INPUT),
    *(whole(arch, config) for arch, config in MODELS.items()),
    *(
        whole(f"{name}, recompute", config, recompute=True)
        for name, config in architectures.tied(MODELS).items()
    ),
    whole("gpt2, tied", replace(GPT, tied=True)),
    whole("llama, biases, recompute", BIASED, recompute=True),
    whole("llama, experts", replace(LLAMA, expert_count=4, expert_used_count=2)),
    whole(
        "qwen3moe, adapters of router and experts",
        with_adapters(MODELS["qwen3moe"], "blk.*.ffn_gate_inp.weight", "blk.*_exps.weight"),
    ),
    whole("llama, factors", replace(LLAMA, rope_factors=(1.0, 3.5))),
    whole("llama, adapters", with_adapters(BIASED)),
    whole("llama, adapter of the head", with_adapters(BIASED, "output.weight", "blk.1.attn_q.weight")),
    whole("qwen2, tied, adapters, recompute", with_adapters(replace(QWEN2, tied=True)), recompute=True),
    whole("phi3, adapters", with_adapters(MODELS["phi3"])),
    whole("gpt2, adapters of some", with_adapters(GPT, "blk.*.attn_qkv.weight", "blk.0.ffn_*")),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def leaves(x: Any) -> list[np.ndarray]:
    if x is None:
        return []
    return [x] if isinstance(x, np.ndarray) else [leaf for item in x for leaf in leaves(item)]


def each(f: Callable[..., Any], x: Any, *others: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(each(f, *items) for items in zip(x, *others, strict=True))
    return f(x, *others)


def dot(a: Any, b: Any) -> float:
    return sum(float(np.vdot(x, y)) for x, y in zip(leaves(a), leaves(b), strict=True))


def fingerprint(x: Any) -> list[bytes]:
    return [leaf.tobytes() for leaf in leaves(x)]


def copied(arrays: Any) -> Any:
    return {name: array.copy() for name, array in arrays.items()}


@dataclass
class Setting:
    layer: nn.Layer
    p: dict[str, np.ndarray]
    x: Any
    g: dict[str, np.ndarray]
    loss: Loss


def weights(layer: nn.Layer, rng: np.random.Generator, dtype: Any) -> dict[str, np.ndarray]:
    return {
        name: ((param.init == "ones") + 0.6 * rng.standard_normal(param.shape)).astype(dtype)
        for name, param in layer.params().items()
    }


def linear_loss(y: Any, rng: np.random.Generator) -> Loss:
    """Return a loss that is the dot product of y and a fixed random array, so that dy is that array."""
    dy = each(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), y)
    return lambda y: (dot(dy, y), dy)


def setting(case: Case, dtype: Any = np.float64) -> Setting:
    rng = np.random.default_rng(len(case.name))
    layer, x = case.layer, case.make(rng, dtype)
    p = weights(layer, rng, dtype)
    g = {name: rng.standard_normal(array.shape).astype(dtype) for name, array in p.items()}
    if case.targets is None:
        return Setting(layer, p, x, g, linear_loss(layer.forward(p, x)[0], rng))
    targets = case.targets(rng, dtype)
    return Setting(layer, p, x, g, lambda y: nn.cross_entropy(y, targets))


@dataclass
class Run:
    y: Any
    dx: Any
    g: dict[str, np.ndarray]


def run(s: Setting, frozen: frozenset[str] = frozenset()) -> Run:
    params = copied(s.p)
    x_before = fingerprint(s.x)
    y, saved = s.layer.forward(params, s.x)
    _, dy = s.loss(y)
    dy_before = fingerprint(dy)
    for array in params.values():
        array.fill(np.nan)  # if `saved` had a view of a weight, the gradients would change
    g = copied({name: array for name, array in s.g.items() if name not in frozen})
    p = copied(s.p) if s.layer.backward_reads_params else {}
    dx = s.layer.backward(p, saved, dy, g)
    assert all(p[name].tobytes() == s.p[name].tobytes() for name in p), "a parameter was written"
    assert fingerprint(s.x) == x_before, "x was written"
    assert fingerprint(dy) == dy_before, "dy was written"
    return Run(y, dx, g)


def measured_slope(s: Setting, p_way: dict[str, np.ndarray], x_way: Any) -> float:
    """Return the fourth-order difference quotient of the loss along a direction in (p, x)."""

    def at(t: float) -> float:
        p = {name: array + t * p_way[name] for name, array in s.p.items()}
        x = s.x if x_way is None else each(lambda a, way: a + t * way, s.x, x_way)
        return s.loss(s.layer.forward(p, x)[0])[0]

    near, far = at(STEP) - at(-STEP), at(2 * STEP) - at(-2 * STEP)
    return (8 * near - far) / (12 * STEP)


@every_case
def test_backward_is_the_derivative_and_adds(case):
    s = setting(case)
    result = run(s)
    rng = np.random.default_rng(1)
    p_way = {name: rng.standard_normal(array.shape) for name, array in s.p.items()}
    is_float = all(leaf.dtype.kind == "f" for leaf in leaves(s.x))
    x_way = each(lambda leaf: rng.standard_normal(leaf.shape), s.x) if is_float else None
    terms = [dot(result.g[name] - s.g[name], p_way[name]) for name in s.p]
    if x_way is not None:
        assert [leaf.shape for leaf in leaves(result.dx)] == [leaf.shape for leaf in leaves(s.x)]
        terms.append(dot(result.dx, x_way))
    assert sum(terms) == pytest.approx(
        measured_slope(s, p_way, x_way), rel=TOLERANCE, abs=TOLERANCE * sum(map(abs, terms))
    )


@every_case
def test_float32_stays_float32(case):
    result = run(setting(case, np.float32))
    arrays = [*leaves(result.y), *leaves(result.dx), *result.g.values()]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}


@every_case
def test_a_frozen_parameter_is_left_alone(case):
    s = setting(case)
    free = run(s)
    for name in s.p:
        rest = run(s, frozenset({name}))
        assert rest.g.keys() == s.p.keys() - {name}
        assert all(rest.g[other].tobytes() == free.g[other].tobytes() for other in rest.g), name
        assert fingerprint(rest.dx) == fingerprint(free.dx), name


def inside(x: Any) -> Iterator[np.ndarray]:
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, dict):
        yield from inside(list(x.values()))
    elif isinstance(x, list | tuple):
        for item in x:
            yield from inside(item)
    elif isinstance(x, nn.Layer):
        yield from inside(vars(x))


@every_case
def test_neither_layer_nor_saved_keeps_a_weight(case):
    """`saved` has no view of a weight: a view would keep the gathered unit in memory."""
    s = setting(case)
    y, saved = s.layer.forward(s.p, s.x)
    s.layer.backward(s.p, saved, s.loss(y)[1], copied(s.g))
    assert not any(np.shares_memory(array, w) for array in inside((saved, y)) for w in s.p.values())
    assert not list(inside(s.layer)), "a layer holds no arrays"


def test_recompute_keeps_only_its_input_and_changes_no_bit():
    inner = block(BIASED)
    rng = np.random.default_rng(0)
    x, p = BLOCK_INPUT(rng, np.float32), weights(inner, rng, np.float32)
    g = {name: np.zeros_like(array) for name, array in p.items()}
    loss = linear_loss(x, rng)
    plain = run(Setting(inner, p, x, g, loss))
    seen: list[str] = []
    with observing(lambda name, *_: seen.append(name)):
        recomputed = run(Setting(nn.Recompute(inner), p, x, g, loss))
    assert [seen.count(f"blk.0.ffn_{name}.weight") for name in ("up", "down")] == [2, 1]
    assert nn.Recompute(inner).forward(p, x)[1] is x
    assert fingerprint((plain.y, plain.dx)) == fingerprint((recomputed.y, recomputed.dx))
    assert [a.tobytes() for a in plain.g.values()] == [a.tobytes() for a in recomputed.g.values()]


TUPLES = (nn.QKNorm, nn.RoPE, nn.ProjectQKV, nn.FusedQKV)  # layers whose outputs are tuples, not one array


@pytest.mark.parametrize(
    "case", [case for case in CASES if not isinstance(case.layer, TUPLES)], ids=lambda case: case.name
)
def test_loss_in_one_is_forward_cross_entropy_and_backward(case):
    s = setting(case)
    logits, saved = s.layer.forward(s.p, s.x)
    targets = np.random.default_rng(0).integers(logits.shape[-1], size=logits.shape[:-1])
    loss, dlogits = nn.cross_entropy(logits, targets, 0.3)
    g, expected_g = copied(s.g), copied(s.g)
    expected_dx = s.layer.backward(s.p, saved, dlogits, expected_g)
    before = fingerprint(s.x)
    actual, dx = s.layer.loss(s.p, s.x, targets, 0.3, g)
    assert isinstance(actual, float)
    assert actual == pytest.approx(loss, rel=1e-12)
    assert s.layer.evaluate(s.p, s.x, targets, 0.3) == pytest.approx(loss, rel=1e-12)
    assert fingerprint(s.x) == before
    for name in g:
        np.testing.assert_allclose(g[name], expected_g[name], rtol=1e-10, atol=1e-12)
    for leaf, expected in zip(leaves(dx), leaves(expected_dx), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-10, atol=1e-12)


def layer_classes() -> Iterator[type[nn.Layer]]:
    for package in (zero_mpi.nn, zero_mpi.models):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    waiting = [nn.Layer]
    while waiting:
        subclasses = waiting.pop().__subclasses__()
        waiting += subclasses
        yield from (cls for cls in subclasses if cls.__module__.startswith("zero_mpi."))


def test_every_layer_class_has_a_case():
    abstract = {Wrapper, Composite, AddsInForward, AddsInBackward}
    covered = {type(case.layer) for case in CASES}
    missing = {cls.__qualname__ for cls in layer_classes()} - {cls.__qualname__ for cls in covered | abstract}
    assert not missing, f"add a case for {', '.join(sorted(missing))}"


def test_a_layer_overwrites_its_input_only_between_layers_that_keep_nothing():
    rope, attention = nn.RoPE(1e4, interleaved=True), nn.CausalAttention(1.0)
    project = nn.ProjectQKV("blk.0", 8, GROUPED)
    assert nn.Chain(project, rope, attention).layers[1].overwrites
    for layers in ((nn.Multiply(2.0), rope, attention), (project, rope, nn.MergeHeads()), (project, rope)):
        assert not nn.Chain(*layers).layers[1].overwrites
    assert not rope.overwrites


def test_what_is_no_chain_is_refused():
    """Layers may share a parameter only if both declare it with the same shape."""
    with pytest.raises(ValueError, match=r"a.weight .*\(5, 7\) and \(2, 5\)"):
        nn.Chain(nn.Linear("a", 7, 5), nn.Linear("a", 5, 2)).params()
    with pytest.raises(ValueError, match="at least one layer"):
        nn.Chain()


@pytest.mark.parametrize(
    "layer",
    [nn.Linear("a", 7, 7), nn.RMSNorm("a", 7, 1e-5), nn.GELU(), nn.Multiply(0.3)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_residual_is_added_whether_or_not_the_layer_can(layer):
    rng = np.random.default_rng(0)
    x, residual = (rng.standard_normal((2, 5, 7)) for _ in range(2))
    p = weights(layer, rng, np.float64)
    y, saved = layer.forward(p, x)
    original = residual.copy()
    for any_layer in (layer, nn.Chain(layer)):
        total, _ = any_layer.forward_onto(p, x, residual)
        np.testing.assert_allclose(total, residual + y, rtol=1e-12, atol=1e-14)
    dx = layer.backward(p, saved, y, {})
    for any_layer, s in ((layer, saved), (nn.Chain(layer), [saved])):
        total = any_layer.backward_onto(p, s, y, {}, residual)
        np.testing.assert_allclose(total, residual + dx, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(residual, original)
