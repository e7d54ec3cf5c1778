"""Hugging Face models in plain NumPy, from the definition of their classes: what conversions are held to.

Tensors have Hugging Face's names and order: rotary halves, (in, out) matrices in gpt2. Nothing of zero_mpi is
used here.
"""

import json

import numpy as np

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-4,
    "hidden_act": "silu",
    "rope_theta": 1000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {"vocab_size": 61, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES},
    "llama, tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "llama, biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {"model_type": "llama", **SIZES, "head_dim": 10},
    "llama 3": {"model_type": "llama", **SIZES, "rope_scaling": LLAMA3},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 10, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", **GPT2, "layer_norm_epsilon": 1e-3},
    "gpt2, untied": {"model_type": "gpt2", **GPT2, "tie_word_embeddings": False},
}


def is_tied(config):
    """Each class has its default."""
    return config.get("tie_word_embeddings", config["model_type"] == "gpt2")


def shapes(config):
    """Name -> shape of all tensors."""
    return gpt2_shapes(config) if config["model_type"] == "gpt2" else rotary_shapes(config)


def gpt2_shapes(config):
    """Of GPT2LMHeadModel."""
    E, V, F = config["n_embd"], config["vocab_size"], config["n_inner"]
    found = {"transformer.wte.weight": (V, E), "transformer.wpe.weight": (config["n_positions"], E)}
    linear = {"attn.c_attn": (E, 3 * E), "attn.c_proj": (E, E), "mlp.c_fc": (E, F), "mlp.c_proj": (F, E)}
    for i in range(config["n_layer"]):
        for name, shape in linear.items():
            found[f"transformer.h.{i}.{name}.weight"] = shape
            found[f"transformer.h.{i}.{name}.bias"] = shape[1:]
        for name in ("ln_1", "ln_2"):
            found |= {f"transformer.h.{i}.{name}.{kind}": (E,) for kind in ("weight", "bias")}
    found |= {f"transformer.ln_f.{kind}": (E,) for kind in ("weight", "bias")}
    return found if is_tied(config) else found | {"lm_head.weight": (V, E)}


def rotary_shapes(config):
    """Of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM."""
    E, V, F = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    D, kind = config.get("head_dim", E // H), config["model_type"]
    attention = {"q_proj": (H * D, E), "k_proj": (K * D, E), "v_proj": (K * D, E), "o_proj": (E, H * D)}
    found = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for name, shape in attention.items():
            found[f"{prefix}self_attn.{name}.weight"] = shape
            if config.get("attention_bias") or (kind == "qwen2" and name != "o_proj"):
                found[f"{prefix}self_attn.{name}.bias"] = shape[:1]
        for name, shape in {"gate_proj": (F, E), "up_proj": (F, E), "down_proj": (E, F)}.items():
            found[f"{prefix}mlp.{name}.weight"] = shape
            if config.get("mlp_bias"):
                found[f"{prefix}mlp.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = (E,)
        if kind == "qwen3":
            found |= {f"{prefix}self_attn.{name}.weight": (D,) for name in ("q_norm", "k_norm")}
    return found if is_tied(config) else found | {"lm_head.weight": (V, E)}


def random_tensors(config, seed=0):
    """Matrices and biases of deviation 0.2, norms around one."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            (("norm" in name or "ln_" in name) and name.endswith("weight")) + 0.2 * rng.standard_normal(shape)
        ).astype(np.float32)
        for name, shape in shapes(config).items()
    }


def write_folder(folder, config, tensors):
    """A folder as `save_pretrained` makes it, by the safetensors library."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def softmax(x):
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attend(q, k, v):
    """Causal attention; q (H, T, D), k and v (K, T, D) -> (T, H * D)."""
    H, T, D = q.shape
    k, v = np.repeat(k, H // len(k), axis=0), np.repeat(v, H // len(v), axis=0)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(D) + np.triu(np.full((T, T), -np.inf), 1)
    return (softmax(scores) @ v).swapaxes(0, 1).reshape(T, H * D)


def rms_norm(x, weight, eps):
    """Over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def frequencies(config, D):
    """Rotary frequencies (D / 2,), scaled as Llama 3 scales them where the configuration asks for it."""
    freqs = config["rope_theta"] ** (-np.arange(0, D, 2) / D)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return freqs
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


def rotate(x, freqs):
    """rotate_half: element j is paired with j + D / 2. x (heads, T, D)."""
    angles = np.arange(x.shape[1])[:, None] * np.concatenate([freqs, freqs])
    half = x.shape[-1] // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * np.cos(angles) + turned * np.sin(angles)


def rotary_logits(config, tensors, ids):
    """Logits (T, V) of llama, qwen2 and qwen3, in float64."""
    w = {name.removeprefix("model."): array.astype(np.float64) for name, array in tensors.items()}
    H, eps = config["num_attention_heads"], config["rms_norm_eps"]
    D = config.get("head_dim", config["hidden_size"] // H)
    freqs, x = frequencies(config, D), w["embed_tokens.weight"][ids]

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    for i in range(config["num_hidden_layers"]):
        prefix = f"layers.{i}."
        h = rms_norm(x, w[f"{prefix}input_layernorm.weight"], eps)
        q, k, v = (
            linear(f"{prefix}self_attn.{n}_proj", h).reshape(len(ids), -1, D).swapaxes(0, 1) for n in "qkv"
        )
        if config["model_type"] == "qwen3":
            q = rms_norm(q, w[f"{prefix}self_attn.q_norm.weight"], eps)
            k = rms_norm(k, w[f"{prefix}self_attn.k_norm.weight"], eps)
        x = x + linear(f"{prefix}self_attn.o_proj", attend(rotate(q, freqs), rotate(k, freqs), v))
        h = rms_norm(x, w[f"{prefix}post_attention_layernorm.weight"], eps)
        gate = linear(f"{prefix}mlp.gate_proj", h)
        x = x + linear(
            f"{prefix}mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(f"{prefix}mlp.up_proj", h)
        )
    head = "embed_tokens.weight" if is_tied(config) else "lm_head.weight"
    return rms_norm(x, w["norm.weight"], eps) @ w[head].T


def gpt2_logits(config, tensors, ids):
    """Logits (T, V) of gpt2, in float64; its Conv1D is x @ weight + bias with weight (in, out)."""
    w = {name.removeprefix("transformer."): array.astype(np.float64) for name, array in tensors.items()}
    H, eps = config["n_head"], config.get("layer_norm_epsilon", 1e-5)

    def conv1d(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    for i in range(config["n_layer"]):
        thirds = np.split(conv1d(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x)), 3, axis=-1)
        q, k, v = (third.reshape(len(ids), H, -1).swapaxes(0, 1) for third in thirds)
        x = x + conv1d(f"h.{i}.attn.c_proj", attend(q, k, v))
        x = x + conv1d(f"h.{i}.mlp.c_proj", gelu(conv1d(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x))))
    head = "wte.weight" if is_tied(config) else "lm_head.weight"
    return norm("ln_f", x) @ w[head].T


def logits(config, tensors, ids):
    """Logits (T, V)."""
    return (gpt2_logits if config["model_type"] == "gpt2" else rotary_logits)(config, tensors, ids)
