"""Models have the tensors and keys of their GGUF architecture, and their files give the same models back."""

from dataclasses import replace
from typing import Any

import architectures
import gguf
import numpy as np
import pytest
from gguf_files import write_tensors

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.errors import UsageError
from zero_mpi.models import ARCHITECTURES, GPT2, Llama, ModelConfig, Qwen2, Qwen3, config_from_gguf
from zero_mpi.models.rotary import RopeScaling, RotaryModel

EXACT = 2.0**-17  # an epsilon that is exact in float32, the type of its key
FLAGS: dict[str, Any] = {"layers": 2, "dim": 24, "heads": 4, "context": 16, "vocab_size": 260}
LLAMA_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SIZES: dict[str, Any] = {"vocab_size": 260, "context_length": 16, "embedding_length": 24}
SIZES |= {"feed_forward_length": 97, "head_count": 6, "head_count_kv": 3, "key_length": 10, "value_length": 7}
SIZES |= {"rms_epsilon": EXACT, "norm_epsilon": EXACT, "rope_freq_base": 500000.0}
MODELS = architectures.every(SIZES)
LLAMA, GPT, QWEN2, QWEN3 = (MODELS[arch] for arch in ("llama", "gpt2", "qwen2", "qwen3"))
PHI3 = MODELS["phi3"]
WINDOWED = ("olmo2", "gemma3")  # architectures whose attention window llama.cpp reads from the file
MIXTURES = [arch for arch in MODELS if ARCHITECTURES[arch].needs_experts]
ROTARY = [config for config in MODELS.values() if isinstance(config, RotaryModel)]


def from_flags(arch: str) -> ModelConfig:
    settings = {} if arch == "gpt2" else {"kv_heads": 4 if arch == "olmoe" else 2, "ffn": 97}
    if arch in MIXTURES:
        settings |= {"ffn": None, "expert_ffn": 97, "experts_used": 3}
    name = "norm_epsilon" if arch == "gpt2" else "rms_epsilon"
    tied = arch in ("qwen3", "smollm3")
    sizes = FLAGS | architectures.ROWS[arch].needed | settings | {"tied": tied}
    return replace(ARCHITECTURES[arch].from_flags(sizes), **{name: EXACT})


# float32 numbers that change if a conversion loses digits
FACTORS = tuple(np.array([1.0, 1 / 3, 8.0, 1e-45, 3.4028235e38], np.float32).tolist())
CONFIGS = {
    **MODELS,
    **architectures.tied(MODELS),
    **{f"{arch}, flags": from_flags(arch) for arch in MODELS},
    **{
        f"{arch}, defaults": ARCHITECTURES[arch].from_flags(FLAGS | row.needed)
        for arch, row in architectures.ROWS.items()
    },
    "llama, biases": replace(LLAMA, biases=frozenset(LLAMA_BIASES)),
    "llama, some biases": replace(LLAMA, biases=frozenset({"ffn_down", "attn_output"})),
    "llama, rope factors": replace(LLAMA, rope_factors=FACTORS),
    "llama, linear": replace(LLAMA, rope_scaling=RopeScaling("linear", 2.5)),
    "qwen3, yarn": replace(QWEN3, rope_scaling=RopeScaling("yarn", 4.0, 8)),
    "phi3, long": replace(PHI3, long_factors=(9.0, 3.0), short_factors=(1.5, 2.0), original_context=8),
    "phi3, magnitude": replace(PHI3, short_factors=(1.5, 2.0), rope_magnitude=1.25),
    "qwen2, no biases": replace(QWEN2, biases=frozenset()),
    "qwen3, biases": replace(QWEN3, biases=QWEN2.biases),
}


@pytest.mark.parametrize("arch", architectures.ROWS)
def test_the_tensors_of_a_row_are_llama_cpps(arch):
    """The gguf package lists the tensors that llama.cpp may find in a file of each architecture."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]}
    row = architectures.ROWS[arch]
    assert {*row.outer, "output", *(f"blk.{{bid}}.{name}" for name in row.block)} <= names
    biases = (name.split(".") for name in MODELS[arch].params() if name.startswith("blk.0."))
    assert {name for _, _, name, kind in biases if kind == "bias"} == set(row.biased)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_tensors_are_those_of_the_architecture(config):
    assert shapes_of(config) == architectures.tensors(config)


def keys_of(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    keys = {"general.architecture": config.arch, **config.metadata()}
    keys |= {f"{config.arch}.{name.replace('__', '.')}": value for name, value in changes.items()}
    return {name: value for name, value in keys.items() if value is not None}


def read_back(config: ModelConfig, **changes: Any) -> ModelConfig:
    return config_from_gguf(keys_of(config, **changes), config.params(), "a file")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_configuration_comes_back_from_its_file(config, tmp_path):
    path = tmp_path / "model.gguf"
    zeros = {name: np.zeros(param.shape, np.float32) for name, param in config.params().items()}
    write_tensors(path, config.arch, config.metadata(), zeros | config.constants())
    file = GGUFFile.open(path)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    actual = config_from_gguf(file.metadata, shapes, str(path), file.read)
    assert actual == config
    actual.check_tensors(shapes, str(path))
    assert list(shapes) == [*actual.params(), *actual.constants()], "the file must keep the order"


@pytest.mark.parametrize("config", ROTARY, ids=lambda config: config.arch)
def test_keys_that_may_be_missing_have_llama_cpps_defaults(config):
    config = replace(config, head_count_kv=6, key_length=4, value_length=4, rope_freq_base=10000.0)
    names = ("head_count_kv", "key_length", "value_length")
    missing = [*(f"attention__{name}" for name in names), "rope__dimension_count", "rope__freq_base"]
    actual = read_back(config, **dict.fromkeys(missing))
    assert actual == config


def test_the_vocabulary_is_the_tokenizers_or_the_key():
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    assert config_from_gguf(keys_of(LLAMA) | tokens, LLAMA.params(), "a file").vocab_size == 3
    assert read_back(LLAMA, vocab_size=np.uint32(77)).vocab_size == 77


def test_flags_that_are_left_out_have_defaults():
    llama, gpt2 = Llama.from_flags(FLAGS), GPT2.from_flags(FLAGS)
    qwen2, qwen3 = Qwen2.from_flags(FLAGS), Qwen3.from_flags(FLAGS)
    assert (llama.tied, llama.head_count_kv, llama.feed_forward_length) == (False, 4, 64)
    assert (gpt2.tied, gpt2.feed_forward_length) == (True, 96)
    assert (llama.key_length, llama.value_length) == (6, 6)
    assert (llama.biases, qwen2.biases, qwen3.biases) == (set(), {"attn_q", "attn_k", "attn_v"}, set())
    for qwen in (qwen2, qwen3):
        names = ("tied", "head_count_kv", "feed_forward_length", "key_length", "value_length")
        assert [getattr(qwen, name) for name in names] == [getattr(llama, name) for name in names]
        assert qwen.rms_epsilon == np.float32(1e-6)


@pytest.mark.parametrize("arch", [arch for arch, row in architectures.ROWS.items() if not row.ties])
def test_a_tied_head_is_refused_where_llama_cpp_does(arch):
    with refused(f"--tied: {arch} "):
        ARCHITECTURES[arch].from_flags(FLAGS | {"tied": True})
    names = (name for name in MODELS[arch].params() if name != "output.weight")
    with refused(rf"a file: output\.weight is missing: {arch} "):
        config_from_gguf(keys_of(MODELS[arch]), names, "a file")


def refused(message: str):
    return pytest.raises(UsageError, match=rf"\A[^\n]*{message}[^\n]*\Z")


IMPOSSIBLE = [
    *((arch, {"heads": 5}, "--heads 5") for arch in ARCHITECTURES),
    *(("llama", {name: 0}, f"--{name} 0: ") for name in ("layers", "dim", "heads", "context")),
    *(("gpt2", {name: -3}, f"--{name.replace('_', '-')} -3: ") for name in ("vocab_size", "ffn")),
    *(("llama", {"kv_heads": number}, f"--kv-heads {number} ") for number in (3, 8, 0)),
    ("llama", {"heads": 8}, "--heads 8 = 3"),
    ("qwen2", {"kv_heads": 3}, "--kv-heads 3"),
    ("qwen3", {"heads": 8}, "--heads 8 = 3"),
    ("gpt2", {"kv_heads": 2}, "--kv-heads 2"),
]


@pytest.mark.parametrize(("arch", "flags", "named"), IMPOSSIBLE)
def test_impossible_sizes_are_refused(arch, flags, named):
    with refused(named):
        ARCHITECTURES[arch].from_flags(FLAGS | flags)


@pytest.mark.parametrize("arch", ["mamba", None])
def test_an_unknown_architecture_is_refused_with_the_known_ones(arch):
    with refused(r"model\.gguf: architecture .* is not known; expected one of gpt2, llama, .*qwen3"):
        config_from_gguf({"general.architecture": arch}, [], "model.gguf")


WIDE = {"rope__dimension_count": 10, "attention__key_length": 10, "attention__value_length": 10}


@pytest.mark.parametrize(
    ("config", "changes", "found"),
    [
        (LLAMA, {"attention__head_count_kv": 4}, "6 heads over 4"),
        (LLAMA, {"rope__dimension_count": 12}, "llama.rope.dimension_count = 12"),
        (LLAMA, {"rope__dimension_count": 9, "attention__key_length": 9}, "llama.rope.dimension_count = 9"),
        (QWEN3, {"rope__dimension_count": 5}, "qwen3.rope.dimension_count = 5"),
        (QWEN2, {"attention__head_count_kv": 4}, "6 heads over 4"),
        (QWEN2, WIDE, r"width 10 .*10.* qwen2.embedding_length = 24"),
        (QWEN2, {"attention__value_length": 5}, r"width 4 .*5"),
        (GPT, {"attention__head_count": 5}, "gpt2.attention.head_count = 5"),
        (LLAMA, {"block_count": np.uint32(3000)}, r"llama\.block_count"),
    ],
)
def test_heads_and_blocks_of_a_file_that_do_not_fit_are_refused(config, changes, found):
    with refused(found):
        read_back(config, **changes).check_tensors(shapes_of(config), "a file")


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        *((config, "rope.scaling.type", "longrope") for config in ROTARY),
        *((config, "rope.scaling.yarn_ext_factor", np.float32(0.5)) for config in ROTARY),
        *((config, "rope.scaling.yarn_beta_fast", np.float32(16)) for config in ROTARY),
        *((config, "expert_count", np.uint32(8)) for config in ROTARY if not config.may_have_experts),
        *((MODELS[arch], "expert_weights_scale", np.float32(2.5)) for arch in MIXTURES),
        *((MODELS[arch], "expert_gating_func", np.uint32(2)) for arch in MIXTURES),
        (MODELS["qwen3moe"], "leading_dense_block_count", np.uint32(2)),
        *((config, "attention.clamp_kqv", np.float32(8)) for config in ROTARY),
        *((config, "attention.causal", False) for config in MODELS.values()),
        *((config, "rope.scaling.attn_factor", np.float32(2)) for config in (LLAMA, QWEN2)),
    ],
)
def test_a_key_that_would_change_the_result_is_refused(config, key, value):
    with refused(rf"{config.arch}\.{key} = "):
        read_back(config, **{key.replace(".", "__"): value})


@pytest.mark.parametrize("config", ROTARY, ids=lambda config: config.arch)
def test_keys_that_say_nothing_are_taken(config):
    neutral = {"rope__scaling__type": "none", "rope__scaling__factor": np.float32(1)}
    neutral |= {"expert_gating_func": 1} if config.expert_count else {"expert_count": 0}
    assert read_back(config, **neutral) == config
    if config.arch not in WINDOWED:
        assert read_back(config, attention__sliding_window=np.uint32(4)) == config


@pytest.mark.parametrize(
    ("arch", "flags", "named"),
    [
        ("qwen3moe", {"experts": None}, "--experts"),
        ("olmoe", {"kv_heads": 2}, "--kv-heads 2"),
        ("granitemoe", {"experts_used": 5}, "--experts-used 5"),
        ("llama", {"experts": None, "expert_ffn": 8}, "--expert-ffn 8"),
        ("llama", {"experts": None, "experts_used": 1}, "--experts-used 1"),
        ("granite", {}, "--experts 4"),
        ("gpt2", {}, "--experts 4"),
        ("llama", {"experts": 0}, "--experts 0"),
    ],
)
def test_flags_of_experts_that_do_not_fit_are_refused(arch, flags, named):
    with refused(named):
        ARCHITECTURES[arch].from_flags(FLAGS | {"experts": 4} | flags)


def test_the_width_of_an_expert_may_follow_from_the_feed_forward():
    config = MODELS["qwen3moe"]
    actual = read_back(config, expert_feed_forward_length=None, feed_forward_length=np.uint32(194))
    assert actual == config
    granite = MODELS["granitemoe"]
    assert read_back(granite, attention__scale=None, embedding_scale=None).embedding_scale == 1
    with refused("granitemoe.logit_scale"):
        read_back(granite, logit_scale=None)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope__scaling__factor": np.float32(8)}, RopeScaling("linear", 8.0)),
        ({"rope__scale_linear": np.float32(2)}, RopeScaling("linear", 2.0)),
        ({"rope__scaling__type": "yarn"}, RopeScaling("yarn", 1.0, 16)),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4,
                "rope__scaling__original_context_length": 9,
                "rope__scaling__yarn_beta_fast": 32,
            },
            RopeScaling("yarn", 4.0, 9),
        ),
    ],
)
@pytest.mark.parametrize("config", ROTARY, ids=lambda config: config.arch)
def test_scaled_rotary_positions_come_from_their_keys(config, keys, scaling):
    assert read_back(config, **keys).rope_scaling == scaling


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: param.shape for name, param in config.params().items()}


@pytest.mark.parametrize("config", MODELS.values(), ids=lambda config: config.arch)
def test_missing_surplus_and_misshapen_tensors_are_named(config):
    stack, of = ("_exps", "5, ") if config.arch in MIXTURES else ("", "")
    down = f"blk.1.ffn_down{stack}.weight"
    for name, shape, message in (
        (f"blk.1.ffn_up{stack}.weight", None, rf"missing blk\.1\.ffn_up{stack}\.weight, surplus none"),
        ("more.weight", (1,), r"missing none, surplus more\.weight"),
        (down, (97, 24), rf"{down} .*\(97, 24\), expected \({of}24, 97\)"),
    ):
        shapes = {key: value for key, value in (shapes_of(config) | {name: shape}).items() if value}
        with refused(rf"a file: .*{message}"):
            config.check_tensors(shapes, "a file")
    with refused(r"missing .* more, surplus none"):
        config.check_tensors({}, "a file")


def test_biases_of_one_block_only_are_missed_in_the_others():
    names = [*LLAMA.params(), "blk.0.ffn_up.bias", "blk.0.ffn_gate.bias"]
    actual = config_from_gguf(keys_of(LLAMA), names, "a file")
    assert actual.biases == {"ffn_up", "ffn_gate"}
    shapes = shapes_of(LLAMA) | {"blk.0.ffn_up.bias": (97,), "blk.0.ffn_gate.bias": (97,)}
    with refused(r"missing blk\.1\.ffn_gate\.bias, blk\.1\.ffn_up\.bias"):
        actual.check_tensors(shapes, "a file")


ROPE = "rope_freqs.weight"


def test_factors_of_frequencies_are_a_constant_of_the_very_bits():
    shapes = shapes_of(LLAMA) | {ROPE: (5,)}
    read = {ROPE: np.array(FACTORS, np.float32)}.__getitem__  # fails for any other tensor
    actual = config_from_gguf(keys_of(LLAMA), shapes, "a file", read)
    actual.check_tensors(shapes, "a file")
    assert actual == replace(LLAMA, rope_factors=FACTORS)
    assert list(actual.constants()) == [ROPE]
    factors = actual.constants()[ROPE]
    assert (factors.dtype, factors.shape) == (np.float32, (5,))
    assert factors.tobytes() == np.array(FACTORS, np.float32).tobytes()
    assert ROPE not in actual.params()
    assert all(config.constants() == {} for config in MODELS.values())
    with refused(ROPE):
        actual.check_tensors(shapes_of(actual), "a file")
    with refused(ROPE):  # no read function is given
        config_from_gguf(keys_of(LLAMA), shapes, "a file")
