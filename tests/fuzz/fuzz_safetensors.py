"""Hugging Face folders with faulty configuration, safetensors, index or tokenizer files."""

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import fuzz_gguf
import hf_models
import numpy as np
import wild

from zero_mpi.data.tokenizers.byte import byte_characters

Header = dict[str, Any]
TOKENIZER_CONFIG = {
    "bos_token": {"content": "<|bos|>"},
    "eos_token": "<|endoftext|>",
    "add_bos_token": True,
    "chat_template": "{{ messages }}",
}
GENERATION = {"bos_token_id": 256, "eos_token_id": [257, 258], "do_sample": True}
SETTINGS = (  # further keys of a configuration
    *("head_dim", "layer_types", "sliding_window", "use_sliding_window", "attention_bias", "mlp_bias"),
    *("quantization_config", "rope_scaling", "rope_parameters", "tie_word_embeddings", "rope_theta"),
    *("partial_rotary_factor", "n_inner", "hidden_act", "activation_function"),
    *("bos_token_id", "eos_token_id"),
)
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@cache
def tensors(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = hf_models.CONFIGS[name] | {"vocab_size": 260}
    return config, hf_models.random_tensors(config)


@cache
def tokenizer_text() -> str:
    """Return a tokenizer.json of the 256 bytes, three special tokens and a merge."""
    special = ["<|bos|>", "<|endoftext|>", "<|pad|>"]
    vocabulary = {c: place for place, c in enumerate([*byte_characters(), *special, "ab"])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 256 + i, "content": text} | flags for i, text in enumerate(special)]
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    first = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [first, {"Sequence": {"id": "A", "type_id": 0}}]}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
            "pre_tokenizer": bytewise,
            "post_processor": {"type": "Sequence", "processors": [template]},
            "decoder": bytewise,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]], "ignore_merges": False},
        }
    )


def packed(arrays: dict[str, np.ndarray]) -> tuple[Header, bytes]:
    header: Header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = array.astype(np.float32).tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": place}
        data += raw
    return header, data


def stored(header: Header | bytes, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else wild.as_text(header)
    return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + data


def write(random: Random, folder: Path) -> tuple[Path, dict[str, Any], Header, bytes]:
    """Write a valid folder; return its path and its configuration, header and data."""
    config, arrays = tensors(random.choice(list(hf_models.CONFIGS)))
    place = folder / "m"
    place.mkdir()
    header, data = packed(arrays)
    (place / "config.json").write_bytes(wild.as_text(config))
    (place / "model.safetensors").write_bytes(stored(header, data))
    (place / "tokenizer.json").write_text(tokenizer_text())
    (place / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (place / "generation_config.json").write_text(json.dumps(GENERATION))
    return place, json.loads(json.dumps(config)), json.loads(json.dumps(header)), data


def sound(random: Random, folder: Path) -> list[str]:
    write(random, folder)
    return fuzz_gguf.command(random, folder, "m")


def config(random: Random, folder: Path) -> list[str]:
    place, content, _, _ = write(random, folder)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        kind, key = random.randrange(6), random.choice([*content, *SETTINGS])
        if kind <= 1:
            content[key] = wild.number(random)
        elif kind == 2:
            content[key] = wild.value(random)
        elif kind == 3:
            content["rope_scaling"] = ROPE | {random.choice(list(ROPE)): wild.value(random)}
        elif kind == 4:
            count = random.choice([1, 2, 3, 10**6, 2 * 10**8])
            content |= {"num_hidden_layers": count, "layer_types": ["full_attention"] * min(count, 10**5)}
        else:
            content = wild.changed_json(random, content)
    raw = wild.as_text(content, random) if random.random() < 0.9 else wild.broken_json(random, content)
    (place / "config.json").write_bytes(raw)
    return fuzz_gguf.command(random, folder, "m")


def header(random: Random, folder: Path) -> list[str]:
    place, _, content, data = write(random, folder)
    kind, raw = random.randrange(8), b""
    if kind <= 1:
        raw = stored(wild.changed_json(random, content), data)
    elif kind == 2:
        raw = stored(wild.broken_json(random, content), data)
    elif kind == 3:
        raw = stored(content, data, random.choice([n for n in wild.INTEGERS if 0 <= n < 2**64]))
    elif kind == 4:
        raw = wild.edited(random, stored(content, data))
    elif kind == 5:
        name = random.choice([name for name in content if name[0] != "_"])
        content[wild.name(random, [name])] = content.pop(name)
        raw = stored(content, data)
    elif kind == 6:
        name = random.choice([name for name in content if name[0] != "_"])
        shapes = [[], [0], [2**62, 4], [-1], [1] * 65, [2**31, 2**33], [1.0], ["1"]]
        content[name]["shape"] = random.choice(shapes)
        raw = stored(content, data)
    else:
        count = random.choice([1000, 100_000, 400_000])
        extra = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
        raw = stored(content | extra, data)
    (place / "model.safetensors").write_bytes(raw)
    return fuzz_gguf.command(random, folder, "m")


def index(random: Random, folder: Path) -> list[str]:
    place, _, content, data = write(random, folder)
    (place / "model.safetensors").unlink()
    names = [name for name in content if name[0] != "_"]
    cut = random.randrange(len(names) + 1)
    table = {}
    for number, part in enumerate((names[:cut], names[cut:])):
        header, start, pieces = {}, 0, b""
        for name in part:
            a, b = content[name]["data_offsets"]
            header[name] = content[name] | {"data_offsets": [start, start := start + b - a]}
            pieces += data[a:b]
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        (place / file).write_bytes(stored(header, pieces))
        table |= dict.fromkeys(part, file)
    body: Any = {"metadata": {"total_size": len(data)}, "weight_map": table}
    kind = random.randrange(5)
    if kind == 0:
        wild.special(random, place / "model-00001-of-00002.safetensors")
    elif kind == 1:
        table[random.choice(names)] = random.choice(["../x.safetensors", "/etc/passwd", wild.text(random), 5])
    elif kind == 2:
        table |= {f"t{i}": "model-00001-of-00002.safetensors" for i in range(random.choice([10, 500_000]))}
    else:
        body = wild.changed_json(random, body)
    raw = wild.as_text(body, random) if random.random() < 0.8 else wild.broken_json(random, body)
    (place / "model.safetensors.index.json").write_bytes(raw)
    return fuzz_gguf.command(random, folder, "m")


def tokenizer(random: Random, folder: Path) -> list[str]:
    place, _, _, _ = write(random, folder)
    name = random.choice(["tokenizer", "tokenizer", "tokenizer_config", "generation_config"])
    path = place / f"{name}.json"
    content = json.loads(path.read_bytes())
    if name == "tokenizer" and random.random() < 0.7:
        changed_tokenizer(random, content)
    else:
        content = wild.changed_json(random, content)
    raw = wild.as_text(content, random) if random.random() < 0.85 else wild.broken_json(random, content)
    path.write_bytes(raw)
    kind = random.randrange(4)
    if kind == 0:
        return ["-m", "zero_mpi", "export", "m", "y.gguf"]
    if kind == 1:
        return fuzz_gguf.train(folder, "--tokenizer", "m/tokenizer.json", "--dim", "8", "--layers", "1")
    return fuzz_gguf.command(random, folder, "m")


def changed_tokenizer(random: Random, content: Any) -> None:
    """Replace a value near the root or in a small table."""
    parts: list[Callable[[], Any]] = [
        lambda: content,
        lambda: content["model"],
        lambda: content["pre_tokenizer"],
        lambda: content["normalizer"],
        lambda: random.choice(content["added_tokens"]),
        lambda: content["post_processor"]["processors"][0],
    ]
    table = random.choice(parts)()
    key = random.choice(list(table))
    deep: Any = {"type": "NFC"}
    for _ in range(random.choice([1, 90, 300])):
        deep = {"type": "Sequence", "normalizers": [deep]}
    tables: list[Callable[[], Any]] = [
        lambda: wild.value(random),
        lambda: wild.number(random),
        lambda: deep,
        lambda: {f"t{i}": i for i in range(random.choice([10, 200_000]))},
        lambda: ["a b"] * random.choice([2, 300_000]),
        lambda: {"a": random.choice(wild.INTEGERS)},
    ]
    table[key] = random.choice(tables)()


FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def special(random: Random, folder: Path) -> list[str]:
    place, _, _, _ = write(random, folder)
    name = random.choice([*FILES, "generation_config.json", "model.safetensors.index.json"])
    if name.startswith("model.safetensors.i"):
        (place / "model.safetensors").unlink()
    (place / name).unlink(missing_ok=True)
    wild.special(random, place / name)
    return fuzz_gguf.command(random, folder, "m")


CASES = {"sound": sound, "config": config, "header": header, "index": index, "tokenizer": tokenizer}
CASES |= {"special": special}
