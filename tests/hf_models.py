"""Hugging Face models in NumPy, written after transformers' classes, as the reference for conversions.

Tensors have Hugging Face's names and order: rotary halves, (in, out) matrices in gpt2. This module does not
use zero_mpi.
"""

import json

import numpy as np

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
SIZES |= {"rms_norm_eps": 1e-4, "hidden_act": "silu", "rope_theta": 1000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "long_factor": [1.5, 2.0, 8.0], "short_factor": [1.0, 1.25, 1.5]}
LONG = {"rope_scaling": LONGROPE, "original_max_position_embeddings": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
GPT2 = {"vocab_size": 61, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.7}
GRANITE |= {"logits_scaling": 1.5}
GEMMA3 = {"model_type": "gemma3_text", **SIZES, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA3 |= {"num_hidden_layers": 7, "head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 5}
GEMMA3 |= {"tie_word_embeddings": True}
del GEMMA3["hidden_act"]
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
OLMOE = {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": False, "num_key_value_heads": 4}
GRANITEMOE = {**GRANITE, **MIXTRAL, "shared_intermediate_size": 14}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES},
    "llama, tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "llama, biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {"model_type": "llama", **SIZES, "head_dim": 10},
    "llama 3": {"model_type": "llama", **SIZES, "rope_scaling": LLAMA3},
    "llama, linear": {"model_type": "llama", **SIZES, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "qwen2, yarn": {"model_type": "qwen2", **SIZES, "rope_scaling": YARN},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 10, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", **SIZES, "num_hidden_layers": 4, "tie_word_embeddings": False},
    "granite": {"model_type": "granite", **SIZES, **GRANITE, "attention_bias": True, "mlp_bias": True},
    "olmo2": {"model_type": "olmo2", **SIZES},
    "gemma3": GEMMA3,
    "gemma3, linear": GEMMA3
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_hidden_layers": 6},
    "mixtral": {"model_type": "mixtral", **SIZES, **MIXTRAL},
    "qwen3moe": {"model_type": "qwen3_moe", **SIZES, **QWEN3MOE, "head_dim": 10},
    "olmoe": {"model_type": "olmoe", **SIZES, **OLMOE},
    "granitemoe": {"model_type": "granitemoeshared", **SIZES, **GRANITEMOE},
    "mistral": {"model_type": "mistral", **SIZES, "head_dim": 10, "sliding_window": None},
    "phi3": {"model_type": "phi3", **SIZES},
    "phi3, partial": {"model_type": "phi3", **SIZES, "partial_rotary_factor": 0.7},
    "phi3, long": {"model_type": "phi3", **SIZES, **LONG},
    "gpt2": {"model_type": "gpt2", **GPT2, "layer_norm_epsilon": 1e-3},
    "gpt2, untied": {"model_type": "gpt2", **GPT2, "tie_word_embeddings": False},
}


def norms_less_one(config):
    return config["model_type"] == "gemma3_text"


def is_tied(config):
    return config.get("tie_word_embeddings", config["model_type"] in ("gpt2", "smollm3", "gemma3_text"))


def shapes(config):
    return gpt2_shapes(config) if config["model_type"] == "gpt2" else rotary_shapes(config)


def gpt2_shapes(config):
    E, V, F = config["n_embd"], config["vocab_size"], config.get("n_inner") or 4 * config["n_embd"]
    table = {"transformer.wte.weight": (V, E), "transformer.wpe.weight": (config["n_positions"], E)}
    linear = {"attn.c_attn": (E, 3 * E), "attn.c_proj": (E, E), "mlp.c_fc": (E, F), "mlp.c_proj": (F, E)}
    for i in range(config["n_layer"]):
        for name, shape in linear.items():
            table[f"transformer.h.{i}.{name}.weight"] = shape
            table[f"transformer.h.{i}.{name}.bias"] = shape[1:]
        for name in ("ln_1", "ln_2"):
            table |= {f"transformer.h.{i}.{name}.{kind}": (E,) for kind in ("weight", "bias")}
    table |= {f"transformer.ln_f.{kind}": (E,) for kind in ("weight", "bias")}
    return table if is_tied(config) else table | {"lm_head.weight": (V, E)}


NORMS = {"olmo2": ("post_attention_layernorm", "post_feedforward_layernorm")}
NORMS["gemma3_text"] = ("input_layernorm", "pre_feedforward_layernorm", *NORMS["olmo2"])
HEAD_NORMS = ("qwen3", "gemma3_text", "qwen3_moe")
JOINT_NORMS = ("olmo2", "olmoe")


def experts_of(config):
    return config.get("num_local_experts", config.get("num_experts", 0))


def expert_shapes(config, E, F):
    """Return the shapes of a block's expert tensors, as transformers 5.24 writes them."""
    N, S = experts_of(config), config.get("shared_intermediate_size")
    if config["model_type"].startswith("granite"):
        table = {"router.layer": (N, E), "input_linear": (N, 2 * F, E), "output_linear": (N, E, F)}
        table = {f"block_sparse_moe.{name}": shape for name, shape in table.items()}
        if S:
            table |= {"shared_mlp.input_linear": (2 * S, E), "shared_mlp.output_linear": (E, S)}
        return table
    mixtral = config["model_type"] == "mixtral"
    module, names = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", PROJECTIONS)
    table = {f"{module}.gate": (N, E)}
    for e in range(N):
        shapes = (F, E), (F, E), (E, F)
        table |= {f"{module}.experts.{e}.{name}": shape for name, shape in zip(names, shapes, strict=True)}
    return table


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def rotary_shapes(config):
    E, V, F = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    D, kind = config.get("head_dim", E // H), config["model_type"]
    attention = {"q_proj": (H * D, E), "k_proj": (K * D, E), "v_proj": (K * D, E), "o_proj": (E, H * D)}
    feed_forward = {"gate_proj": (F, E), "up_proj": (F, E), "down_proj": (E, F)}
    if kind == "phi3":
        attention = {"qkv_proj": ((H + 2 * K) * D, E), "o_proj": (E, H * D)}
        feed_forward = {"gate_up_proj": (2 * F, E), "down_proj": (E, F)}
    table = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for name, shape in attention.items():
            table[f"{prefix}self_attn.{name}.weight"] = shape
            if config.get("attention_bias") or (kind == "qwen2" and name != "o_proj"):
                table[f"{prefix}self_attn.{name}.bias"] = shape[:1]
        if experts_of(config):
            shapes = expert_shapes(config, E, config.get("moe_intermediate_size", F))
            table |= {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
        for name, shape in {}.items() if experts_of(config) else feed_forward.items():
            table[f"{prefix}mlp.{name}.weight"] = shape
            if config.get("mlp_bias"):
                table[f"{prefix}mlp.{name}.bias"] = shape[:1]
        for name in NORMS.get(kind, ("input_layernorm", "post_attention_layernorm")):
            table[f"{prefix}{name}.weight"] = (E,)
        if kind in JOINT_NORMS:
            table |= {f"{prefix}self_attn.{n}_norm.weight": (heads * D,) for n, heads in (("q", H), ("k", K))}
        if kind in HEAD_NORMS:
            table |= {f"{prefix}self_attn.{name}.weight": (D,) for name in ("q_norm", "k_norm")}
    return table if is_tied(config) else table | {"lm_head.weight": (V, E)}


def random_tensors(config, seed=0):
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        values, norm = 0.2 * rng.standard_normal(shape), ("norm" in name or "ln_" in name)
        if norm and norms_less_one(config):
            values = np.round(values * 1024) / 1024 + 0.0  # + 0.0 turns -0 into 0
        elif norm and name.endswith("weight"):
            values += 1
        return values.astype(np.float32)

    return {name: draw(name, shape) for name, shape in shapes(config).items()}


def write_folder(folder, config, tensors):
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attend(q, k, v, scale=None, window=None):
    """Compute causal attention to at most `window` positions; q (H, T, D), k, v (K, T, D) -> (T, H * D)."""
    H, T, D = q.shape
    k, v = np.repeat(k, H // len(k), axis=0), np.repeat(v, H // len(v), axis=0)
    scores = q @ k.swapaxes(1, 2) * (D**-0.5 if scale is None else scale) + np.triu(
        np.full((T, T), -np.inf), 1
    )
    if window is not None:
        scores += np.tril(np.full((T, T), -np.inf), -window)
    return (softmax(scores) @ v).swapaxes(0, 1).reshape(T, H * D)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def frequencies(config, D, T):
    """Return rotary frequencies (D / 2,) for a text of T tokens, scaled by the configuration."""
    D = turned_width(config, D)
    freqs = config["rope_theta"] ** (-np.arange(0, D, 2) / D)
    scaling = config.get("rope_scaling")
    if scaling is None or scaling["rope_type"] == "default":
        return freqs
    if scaling["rope_type"] == "linear":
        return freqs / scaling["factor"]
    if scaling["rope_type"] == "longrope":
        length = "long" if first_context(config) < T else "short"
        return freqs / scaling[f"{length}_factor"]
    if scaling["rope_type"] == "yarn":
        return yarn(freqs, config, D)
    old, low, high = (
        scaling[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    for j, freq in enumerate(freqs):
        wave = 2 * np.pi / freq
        if wave > old / low:
            freqs[j] = freq / scaling["factor"]
        elif wave >= old / high:
            smooth = (old / wave - low) / (high - low)
            freqs[j] = (1 - smooth) * freq / scaling["factor"] + smooth * freq
    return freqs


def yarn(freqs, config, D):
    """Divide frequencies of less than 1 turn in the original context; keep those over 32; blend the rest."""
    scaling, base = config["rope_scaling"], config["rope_theta"]
    old = scaling["original_max_position_embeddings"]
    low, high = (D * np.log(old / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32, 1))
    low, high = max(np.floor(low), 0), min(np.ceil(high), D - 1)
    ramp = np.clip((np.arange(D // 2) - low) / max(high - low, 0.001), 0, 1)
    return freqs / scaling["factor"] * ramp + freqs * (1 - ramp)


def first_context(config):
    return config.get("original_max_position_embeddings", 4096)


def magnitude(config):
    scaling, old = config.get("rope_scaling") or {}, first_context(config)
    if scaling.get("attention_factor"):
        return scaling["attention_factor"]
    if scaling.get("rope_type") == "longrope":
        times = scaling.get("factor") or config["max_position_embeddings"] / old
        return np.sqrt(1 + np.log(times) / np.log(old)) if times > 1 else 1
    return 1 + 0.1 * np.log(scaling["factor"]) if scaling.get("rope_type") == "yarn" else 1


def turned_width(config, D):
    """Return the number of rotated elements of a head, set inside or outside `rope_scaling` (Phi 3)."""
    inside = config.get("rope_scaling") or {}
    return int(D * inside.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)))


def rotate(x, freqs, times=1):
    """Rotate the pairs (j, j + P) for j < P = len(freqs); keep the other elements. x (heads, T, D)."""
    x, rest = x[..., : 2 * len(freqs)], x[..., 2 * len(freqs) :]
    angles = np.arange(x.shape[1])[:, None] * np.concatenate([freqs, freqs])
    half = x.shape[-1] // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return np.concatenate([times * (x * np.cos(angles) + turned * np.sin(angles)), rest], axis=-1)


def rotary_logits(config, tensors, ids):
    """Return logits (T, V) of llama and related models, in float64."""
    w = {name.removeprefix("model."): array.astype(np.float64) for name, array in tensors.items()}
    if norms_less_one(config):
        w = {name: array + ("norm" in name) for name, array in w.items()}
        config = config | {"embedding_multiplier": config["hidden_size"] ** 0.5}
    x = w["embed_tokens.weight"][ids] * config.get("embedding_multiplier", 1)
    before, after = BRANCHES.get(config["model_type"], (["input_layernorm", "post_attention_layernorm"], []))
    for i in range(config["num_hidden_layers"]):
        for number, branch in enumerate((self_attention, feed_forward)):
            h = x
            for name in before[number : number + 1]:
                h = rms_norm(h, w[f"layers.{i}.{name}.weight"], config["rms_norm_eps"])
            h = branch(config, w, i, h)
            for name in after[number : number + 1]:
                h = rms_norm(h, w[f"layers.{i}.{name}.weight"], config["rms_norm_eps"])
            x = x + config.get("residual_multiplier", 1) * h
    head = "embed_tokens.weight" if is_tied(config) else "lm_head.weight"
    return rms_norm(x, w["norm.weight"], config["rms_norm_eps"]) @ w[head].T / config.get("logits_scaling", 1)


BRANCHES = {
    "olmo2": ([], NORMS["olmo2"]),
    "gemma3_text": (NORMS["gemma3_text"][:2], NORMS["olmo2"]),
}  # names of norms before and after attention and feed-forward


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def self_attention(config, w, i, x):
    prefix, kind, T = f"layers.{i}.self_attn", config["model_type"], len(x)
    D = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    eps = config["rms_norm_eps"]
    if kind == "phi3":
        rows = np.cumsum([config["num_attention_heads"], config["num_key_value_heads"]]) * D
        q, k, v = np.split(linear(w, f"{prefix}.qkv_proj", x), rows, axis=-1)
    else:
        q, k, v = (linear(w, f"{prefix}.{name}_proj", x) for name in "qkv")
    if kind in JOINT_NORMS:
        q, k = (rms_norm(y, w[f"{prefix}.{name}_norm.weight"], eps) for name, y in (("q", q), ("k", k)))
    q, k, v = (y.reshape(T, -1, D).swapaxes(0, 1) for y in (q, k, v))
    if kind in HEAD_NORMS:
        q, k = (rms_norm(y, w[f"{prefix}.{name}_norm.weight"], eps) for name, y in (("q", q), ("k", k)))
    kinds = config.get("layer_types")
    sees_all = kinds[i] == "full_attention" if kinds else (i + 1) % 6 == 0
    window = config["sliding_window"] if kind == "gemma3_text" and not sees_all else None
    if window is not None:
        config = config | {"rope_theta": 10000.0, "rope_scaling": None}
    if kind != "smollm3" or (i + 1) % config.get("no_rope_layer_interval", 4):
        q, k = (rotate(y, frequencies(config, D, T), magnitude(config)) for y in (q, k))
    return linear(w, f"{prefix}.o_proj", attend(q, k, v, config.get("attention_multiplier"), window))


def mixture(config, w, i, x):
    U, P = config["num_experts_per_tok"], f"layers.{i}."
    granite, mixtral = config["model_type"].startswith("granite"), config["model_type"] == "mixtral"
    module = "mlp" if config["model_type"] in ("qwen3_moe", "olmoe") else "block_sparse_moe"
    router = w[f"{P}{module}.{'router.layer' if granite else 'gate'}.weight"]
    y = np.zeros_like(x)
    for t, p in enumerate(softmax(x @ router.T)):
        experts = np.argsort(-p, kind="stable")[:U]
        total = p[experts].sum() if config.get("norm_topk_prob", True) else 1
        for e in experts:
            if granite:
                gate, up = np.split(w[f"{P}{module}.input_linear.weight"][e], 2)
                down = w[f"{P}{module}.output_linear.weight"][e]
            else:
                names = ("w1", "w3", "w2") if mixtral else PROJECTIONS
                gate, up, down = (w[f"{P}{module}.experts.{e}.{name}.weight"] for name in names)
            y[t] += p[e] / total * (down @ (silu(gate @ x[t]) * (up @ x[t])))
    if f"{P}shared_mlp.input_linear.weight" in w:
        gate, up = np.split(linear(w, f"{P}shared_mlp.input_linear", x), 2, axis=-1)
        y += linear(w, f"{P}shared_mlp.output_linear", silu(gate) * up)
    return y


def silu(x):
    return x / (1 + np.exp(-x))


def feed_forward(config, w, i, x):
    if experts_of(config):
        return mixture(config, w, i, x)
    if config["model_type"] == "phi3":
        gate, up = np.split(linear(w, f"layers.{i}.mlp.gate_up_proj", x), 2, axis=-1)
    else:
        gate, up = (linear(w, f"layers.{i}.mlp.{name}_proj", x) for name in ("gate", "up"))
    passed = gelu(gate) if config["model_type"] == "gemma3_text" else silu(gate)
    return linear(w, f"layers.{i}.mlp.down_proj", passed * up)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gpt2_logits(config, tensors, ids):
    """Return logits (T, V) of gpt2 in float64; its Conv1D is x @ weight + bias with weight (in, out)."""
    w = {name.removeprefix("transformer."): array.astype(np.float64) for name, array in tensors.items()}
    H, eps = config["n_head"], config.get("layer_norm_epsilon", 1e-5)

    def conv1d(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    for i in range(config["n_layer"]):
        thirds = np.split(conv1d(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x)), 3, axis=-1)
        q, k, v = (third.reshape(len(ids), H, -1).swapaxes(0, 1) for third in thirds)
        x = x + conv1d(f"h.{i}.attn.c_proj", attend(q, k, v))
        x = x + conv1d(f"h.{i}.mlp.c_proj", gelu(conv1d(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x))))
    head = "wte.weight" if is_tied(config) else "lm_head.weight"
    return norm("ln_f", x) @ w[head].T


def logits(config, tensors, ids):
    return (gpt2_logits if config["model_type"] == "gpt2" else rotary_logits)(config, tensors, ids)
