"""Converts a model with GGUF's names and keys to the content of a Hugging Face folder.

`config_json` converts the keys to Hugging Face's settings. `file_tensors` lists the tensors, which yield
their elements in the order of that format. A model that the settings cannot describe is refused.
"""

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from zero_mpi.checkpoint.gguf.index import Metadata
from zero_mpi.checkpoint.huggingface import folder as hf_folder
from zero_mpi.checkpoint.huggingface import names as hf_names
from zero_mpi.checkpoint.huggingface import rope
from zero_mpi.checkpoint.huggingface.config import GPT2_SIZES, SIZES, score_width
from zero_mpi.checkpoint.huggingface.families import FAMILIES, MIXTURES, ROTARY_CLASSES, Order, RotaryClass
from zero_mpi.checkpoint.safetensors import INDEX, SINGLE, pack_header
from zero_mpi.checkpoint.tensor_file import CHUNK, Floats, TensorSpec
from zero_mpi.checkpoint.weights import WeightSource, folder_of, lora_of
from zero_mpi.commands.export.gguf_files import encoded_pieces, in_parts
from zero_mpi.data import KINDS, tokenizer_config, tokenizer_json
from zero_mpi.data.conversations.chat_template import template_of
from zero_mpi.data.tokenizers.gguf_tokenizer import CONTROL, USER_DEFINED, GGUFTokenizer
from zero_mpi.errors import FileError, UsageError, naming
from zero_mpi.files.atomic import write_to_disk
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import MOST_SIZE, GGUFKeys
from zero_mpi.files.open import read_file

ANSWER = "the 17th answer"
MESSAGES = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": ANSWER}]
EOT, EOM = "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"


def ends_of(metadata: Metadata, place: str) -> tuple[list[int], dict[str, Any]]:
    """Return the ids that end an answer, eos first, and a GGUF key for an id that only the template reveals.

    For an unknown or invalid tokenizer, both are empty.
    """
    kind = KINDS.get(GGUFKeys(metadata, place).tokenizer or "")
    if kind is None:
        return [], {}
    try:
        tokenizer = kind(metadata, place)
    except UsageError:  # then the model is exported without its tokenizer
        return [], {}
    end, first = turn_end(tokenizer), [] if tokenizer.eos is None else [tokenizer.eos]
    ends = first + sorted((tokenizer.ends if end is None else tokenizer.ends | {end}) - set(first))
    if end in (None, tokenizer.eos) or (EOT in metadata and end in tokenizer.ends):
        return ends, {}
    return ends, {EOM if EOT in metadata else EOT: np.uint32(end)}


def turn_end(tokenizer: GGUFTokenizer) -> int | None:
    """Return the token with which the chat template ends an answer; None if it uses no token."""
    try:
        text = template_of(tokenizer).render(MESSAGES).text
    except (UsageError, ValueError):  # there is no template, or it rejects MESSAGES
        return None
    kinds, suffix = (CONTROL, USER_DEFINED), text.rpartition(ANSWER)[2].lstrip()
    tokens = [token for token in tokenizer.tokens if suffix.startswith(token)]
    ids = [tokenizer.ids[token] for token in sorted(tokens, key=len)]
    return next((token for token in reversed(ids) if tokenizer.types[token] in kinds), None)


LLAMA3_USUAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
USUAL_CONTEXTS = (8192, *(1 << bits for bits in range(4, 21)))
TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write into a Hugging Face folder: its name and shape there, and its source.

    `runs` lists the ranges of elements in the source that form the tensor; () stands for all of `spec`.
    """

    name: str
    shape: tuple[int, ...]
    source: WeightSource
    spec: TensorSpec
    order: Order
    head: int
    runs: tuple[tuple[str, int, int], ...] = ()

    def pieces(self) -> Iterator[Floats]:
        """Yield the tensor's elements as flat arrays, in the order of the folder."""
        read = partial(self.source.read, self.spec.name)
        rows = self.spec.shape[0]
        if self.order == Order.HALVES:
            return hf_names.halves_of(read, self.head, self.spec.size // rows, rows // self.head)
        if self.order == Order.TRANSPOSED:
            return hf_names.transposes_of(read, rows, self.spec.shape[1])
        chunks = (
            self.source.read(name, first, min(stop, first + CHUNK))
            for name, start, stop in self.runs or ((self.spec.name, 0, self.spec.size),)
            for first in range(start, stop, CHUNK)
        )
        return (chunk - 1 for chunk in chunks) if self.order == Order.LESS_ONE else chunks


class Keys:
    """Reader of the architecture's keys in a source."""

    def __init__(self, source: WeightSource) -> None:
        self.source, self.keys = source, GGUFKeys(source.metadata, str(source.path))
        self.arch = self.keys.architecture or ""
        mixtral = self.arch == "llama" and (self.size("expert_count", 0) or 0) > 0
        self.family = "mixtral" if mixtral else self.arch
        if self.arch not in FAMILIES:
            raise FileError(f"{source.path}: architecture {show(self.arch)} has no Hugging Face counterpart")

    def size(self, name: str, least: int = 1) -> int | None:
        """Return the integer of key ARCH.NAME; None if the key is missing."""
        return self.keys.integer(f"{self.arch}.{name}", least, MOST_SIZE)

    def number(self, name: str) -> float | None:
        """Return the number of key ARCH.NAME in a form for JSON; None if the key is missing."""
        key = f"{self.arch}.{name}"
        return None if self.keys.number(key, 0) is None else plain(self.source.metadata[key])

    def head_width(self, kind: str = "key") -> int:
        """Return the number of rows of q and k (or of v: kind "value") in each head."""
        default = (self.size("embedding_length") or 0) // (self.size("attention.head_count") or 1)
        return self.size(f"attention.{kind}_length") or default


def plain(value: Any) -> Any:
    """Return a number for JSON. A float32 becomes the shortest decimal that reads back the same."""
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def file_tensors(source: WeightSource) -> list[FileTensor]:
    """Return the tensors to write into a folder. Raise FileError if one has no counterpart in the format."""
    keys = Keys(source)
    width, is_mixture = 0 if keys.arch == "gpt2" else keys.head_width(), keys.family in MIXTURES
    tensors: list[FileTensor] = []
    for name, spec in source.tensors.items():
        if is_mixture and (parts := hf_names.parts_from(keys.family, name, spec.shape)) is not None:
            tensors += of_experts(source, spec, parts)
        elif name not in (rope.ROPE_FREQS, *rope.LONG_FACTORS):  # config.json has these numbers
            order = hf_names.order_of(keys.family, name)
            shape = spec.shape[::-1] if order == Order.TRANSPOSED else spec.shape
            target = hf_names.from_gguf(keys.family, name)
            tensors.append(FileTensor(target, shape, source, spec, order, width))
    return tensors


def of_experts(
    source: WeightSource, spec: TensorSpec, parts: list[tuple[str, tuple[int, ...], list[str]]]
) -> Iterator[FileTensor]:
    """Yield the tensors of experts: either one tensor for each expert, or one for all experts."""
    stack = spec.shape[0] if len(spec.shape) == 3 else 1
    for place, (target, shape, names) in enumerate(parts):
        size, experts = spec.size // stack, range(place, place + 1) if len(parts) > 1 else range(stack)
        runs = tuple((name, e * size, (e + 1) * size) for e in experts for name in names)
        yield FileTensor(target, shape, source, spec, Order.SAME, 0, runs)


def config_json(source: WeightSource, dtype: str) -> dict[str, Any]:
    """Return the content of config.json; `dtype` is "float32", "float16" or "bfloat16"."""
    keys = Keys(source)
    sizes = {name: keys.size(key) for key, name in (GPT2_SIZES if keys.arch == "gpt2" else SIZES).items()}
    kind = ROTARY_CLASSES.get(keys.family)
    settings = {
        "n_inner": keys.size("feed_forward_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }
    if kind is not None:
        settings = rotary_settings(keys, kind)
    return {
        "architectures": ["GPT2LMHeadModel" if kind is None else kind.name],
        "model_type": (kind and kind.model_type) or keys.family,
        **sizes,
        "vocab_size": source.tensors[hf_folder.EMBEDDING].shape[0],
        **settings,
        "tie_word_embeddings": hf_folder.HEAD not in source.tensors,
        **special_tokens(source),
        "torch_dtype": dtype,
    }


def special_tokens(source: WeightSource) -> dict[str, int | list[int] | None]:
    """Return the ids of bos, eos and padding; None if missing, a list if several tokens end an answer."""
    keys = GGUFKeys(source.metadata, str(source.path))
    # The keys read from a Hugging Face folder do not include its tokenizer.
    folder = folder_of(source)
    config = {} if folder is None else folder.config
    ids = {
        setting: config.get(setting, keys.integer(f"tokenizer.ggml.{token}_token_id"))
        for setting, token in TOKENS.items()
    }
    ends, _ = ends_of(source.metadata, keys.place)
    return ids | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def rotary_settings(keys: Keys, kind: RotaryClass) -> dict[str, Any]:
    """Return the settings of a rotary model's class."""
    width, base = keys.head_width(), keys.number("rope.freq_base") or 10000.0
    rotary = keys.size("rope.dimension_count") or width
    if keys.head_width("value") != width or (rotary != width and not kind.longrope):
        problem = "heads of q and v differ in width, or only part of a head is rotated"
        raise FileError(f"{keys.source.path}: {problem}, which config.json of {keys.arch} cannot express")
    scaling, from_keys = rope_scaling(keys.source, base, width), key_scaling(keys)
    if kind.longrope:
        scaling = longrope(keys)
    if from_keys is not None and (kind.longrope or scaling is not None):
        problem = "frequencies are scaled by keys" + (" and by a tensor" if scaling else "")
        raise FileError(f"{keys.source.path}: {problem}, which config.json of {keys.arch} cannot express")
    scaling = from_keys if scaling is None else scaling
    # Phi 3's class reads the original context from a separate setting and not from the scaling.
    former = {rope.CONTEXT: scaling[rope.CONTEXT]} if kind.longrope and scaling else {}
    return {
        "num_key_value_heads": keys.size("attention.head_count_kv") or keys.size("attention.head_count"),
        "head_dim": width,
        kind.activation[0]: kind.activation[1][0],
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": base,
        "rope_scaling": scaling,
        **former,
        **({rope.PARTIAL: math.nextafter(rotary / width, 1)} if rotary != width else {}),
        **{
            name: keys.number(key) or (width**-0.5 if key == "attention.scale" else default)
            for key, (name, default) in kind.numbers.items()
        },
        **{name: keys.size(key, 0) or 0 for key, name in kind.sizes.items()},
        **window_settings(keys, kind),
        **bias_settings(keys.source, kind),
        **kind.written,
    }


def window_settings(keys: Keys, kind: RotaryClass) -> dict[str, Any]:
    """Return the settings for attention windows: size and layers; {} for classes without windows."""
    if not kind.period:
        return {}
    window = keys.size("attention.sliding_window", 0) or None  # 0: every layer sees all positions
    blocks = range(1, 1 + (keys.size("block_count") or 0))
    return {
        "sliding_window": window,
        "layer_types": [rope.SLIDING if window and number % kind.period else rope.FULL for number in blocks],
        "query_pre_attn_scalar": score_width(
            keys.size("embedding_length") or 0,
            keys.size("attention.head_count") or 1,
            blocks.stop - 1,
            keys.head_width(),
        ),
    }


def bias_settings(source: WeightSource, kind: RotaryClass) -> dict[str, bool]:
    """Return the settings for biases. Each setting covers several projections."""
    names = {
        name.split(".")[2] for name in source.tensors if name.startswith("blk.") and name.endswith(".bias")
    }
    for stems in kind.biases.values():
        if names & stems not in (set(), stems):
            text = ", ".join(sorted(names & stems))
            raise FileError(f"{source.path}: biases of {text} only: config.json can express all or none")
    return {name: bool(names & stems) for name, stems in kind.biases.items()}


def key_scaling(keys: Keys) -> dict[str, Any] | None:
    """Return the linear or YaRN scaling that the keys describe; None if they describe none."""
    kind = keys.keys.text(f"{keys.arch}.rope.scaling.type")
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    if kind == "yarn":
        context = keys.size("rope.scaling.original_context_length") or keys.size("context_length")
        return {"rope_type": kind, "factor": factor, rope.CONTEXT: context}
    return None if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}


def longrope(keys: Keys) -> dict[str, Any] | None:
    """Return Phi 3's scaling, or None if the model has none. Raise FileError if a tensor of it is missing."""
    names = [name for name in rope.LONG_FACTORS if name in keys.source.tensors]
    magnitude = keys.number("rope.scaling.attn_factor") or 1.0
    if not names and magnitude == 1:
        return None
    if len(names) < len(rope.LONG_FACTORS):
        part = names[0] if names else "rope.scaling.attn_factor"
        raise FileError(f"{keys.source.path}: has {part} without the other values of LongRoPE")
    factors = {rope.LONG_FACTORS[name]: list(map(plain, keys.source.read(name))) for name in names}
    context = keys.size("rope.scaling.original_context_length") or keys.size("context_length")
    return {"rope_type": rope.LONGROPE, **factors, rope.CONTEXT: context, "attention_factor": magnitude}


def rope_scaling(source: WeightSource, base: float, width: int) -> dict[str, Any] | None:
    """Return the setting that produces the divisors in `rope_freqs.weight`; None without this tensor.

    The setting in the model's keys is tried first, then the tensor's largest divisor as the factor with usual
    contexts, because all Llama 3 models share the other numbers. Raises FileError if no setting matches.
    """
    if rope.ROPE_FREQS not in source.tensors:
        return None
    divisors, setting = source.read(rope.ROPE_FREQS), rope.stored_scaling(source.metadata)
    defaults = LLAMA3_USUAL | {"factor": float(divisors.max())}
    guesses = (defaults | {rope.CONTEXT: context} for context in USUAL_CONTEXTS)
    for guess in chain([] if setting is None else [setting], guesses):
        factors = rope.llama3_factors(base, width, **guess)
        if factors.shape == divisors.shape and np.allclose(factors, divisors, rtol=1e-5, atol=0):
            return {"rope_type": "llama3", **{name: guess[name] for name in rope.LLAMA3}}
    raise FileError(f"{source.path}: {rope.ROPE_FREQS} is not a Llama 3 scaling, but config.json needs one")


DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # types that safetensors can also store
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, MORE_TEMPLATES = "generation_config.json", "additional_chat_templates"
COPIED_FILES = (  # files copied from one Hugging Face folder to another
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", GENERATION),
)

Kinds = dict[str, str]  # type of each tensor, by name


def write_folder(source: WeightSource, file_type: str, most: int, folder: Path) -> Kinds:
    """Write config.json, tensors and tokenizer into a new folder. Return the type of each tensor."""
    config, tensors = config_json(source, DTYPES[file_type]), file_tensors(source)
    folder.mkdir()
    write_json(folder / hf_folder.CONFIG, config)
    kind = GGMLQuantizationType[file_type.upper()]
    width = 4 if file_type == "f32" else 2
    parts = in_parts(tensors, [width * tensor.spec.size for tensor in tensors], most)
    names = [SINGLE]
    if len(parts) > 1:
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
        weight_map = {tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = width * sum(tensor.spec.size for tensor in tensors)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for name, part in zip(names, parts, strict=True):
        write_part(folder / name, part, kind)
    write_tokenizer(source, folder)
    special = {name: config[name] for name in TOKENS if config[name] is not None}
    if special and folder_of(source) is None:
        write_json(folder / GENERATION, special)
    return {tensor.name: file_type for tensor in tensors}


def write_part(path: Path, tensors: Sequence[FileTensor], kind: GGMLQuantizationType) -> None:
    """Write the tensors of one part as a safetensors file."""
    with naming(path), open(path, "wb") as file:
        file.write(pack_header([(tensor.name, kind.name, tensor.shape) for tensor in tensors]))
        for tensor in tensors:
            label = f"{tensor.source.path}: tensor {show(tensor.spec.name)}"
            file.writelines(encoded_pieces(label, tensor.pieces(), kind))
        file.flush()
        os.fsync(file.fileno())


def write_tokenizer(source: WeightSource, folder: Path) -> None:
    """Write the tokenizer's files, copied from a folder or made from keys; none without a tokenizer."""
    keys = GGUFKeys(source.metadata, str(source.path))
    if keys.tokenizer == "gpt2":
        write_json(folder / TOKENIZER, tokenizer_json(keys.metadata, keys.place))
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config(keys.metadata, keys.place))
    elif keys.tokenizer is not None:
        problem = f"has the tokenizer {show(keys.tokenizer)}, for which no tokenizer.json is written"
        warn(f"{keys.place}: {problem}: copy the tokenizer's files of the original model into the folder")
    elif os.path.isdir(source.path):
        templates = sorted(path.name for path in (source.path / MORE_TEMPLATES).glob("*.jinja"))
        for name in [*COPIED_FILES, *(f"{MORE_TEMPLATES}/{template}" for template in templates)]:
            if os.path.isfile(source.path / name):
                (folder / name).parent.mkdir(exist_ok=True)
                write_to_disk(folder / name, read_file(source.path / name, expected="a tokenizer's file"))


def warn(text: str) -> None:
    print(f"zero_mpi export: warning: {text}", file=sys.stderr)


def write_json(path: Path, content: Any) -> None:
    write_to_disk(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_peft(adapter: WeightSource, base: WeightSource, file_type: str, folder: Path) -> Kinds:
    """Write an adapter into a new PEFT folder; return tensor types. Raise FileError if that is impossible."""
    keys = GGUFKeys(base.metadata, str(base.path))
    tensors = list[FileTensor]()
    for spec in adapter.tensors.values():
        target, dot, end = spec.name.rpartition(".")
        order, head = hf_folder.order_and_head(spec, target, dot + end, keys)
        name = f"{hf_folder.PREFIX}{layer_of(keys.architecture or '', target)}{hf_folder.ENDS[dot + end]}"
        tensors.append(FileTensor(name, spec.shape, adapter, spec, order, head))
    config = config_of(adapter, base, keys.architecture or "")
    folder.mkdir()
    write_json(folder / hf_folder.PEFT_CONFIG, config)
    write_part(folder / hf_folder.PEFT_MODEL, tensors, GGMLQuantizationType[file_type.upper()])
    return {tensor.name: file_type for tensor in tensors}


def layer_of(arch: str, weight: str) -> str:
    """Return the path, in the class of transformers, of the layer whose weight has this GGUF name."""
    return hf_names.from_gguf(arch, weight).removesuffix(".weight")


def config_of(adapter: WeightSource, base: WeightSource, arch: str) -> dict[str, Any]:
    """Return the content of adapter_config.json. It lists full layer names because blocks may differ."""
    lora = lora_of(adapter)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.path) if isinstance(base, hf_folder.HuggingFaceFolder) else None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": arch == "gpt2",
        "inference_mode": True,
        "target_modules": [layer_of(arch, name) for name in lora.targets],
    }
