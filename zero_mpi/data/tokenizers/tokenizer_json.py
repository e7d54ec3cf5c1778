"""Converts a Hugging Face tokenizer.json to GGUF keys, and back.

Reading follows llama.cpp's converter. Tokens are in the order of their ids. A missing id becomes `[PADn]` of
type "unused". Added tokens become control tokens (if the file marks them as special, or if they look like
control tokens) or user-defined tokens. Bos, eos and the chat template come from files in the same folder.
Rules that change ids but have no GGUF key are stored as `huggingface_rules`; other rules are refused.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.data.tokenizers.bpe import BPETokenizer
from zero_mpi.data.tokenizers.gguf_tokenizer import CONTROL, KEY, NORMAL, UNUSED, USER_DEFINED
from zero_mpi.data.tokenizers.huggingface_rules import FLAGS, check_normalizer, rules_json, tokenizers
from zero_mpi.data.tokenizers.pretokenizers import name_of
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.gguf_keys import TEMPLATE, THE_FILE, GGUFKeys
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json
from zero_mpi.files.text_streams import is_text

_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # Hugging Face name: GGUF name
_CONFIG, _MODEL_CONFIGS = "tokenizer_config", ("config", "generation_config")  # files in the same folder
_WAY_OUT = "use a GGUF that llama.cpp made from the model, or token files for train --data (1-D .npy)"
_MOST, _MOST_SIBLING = 32 << 20, 4 << 20  # limits in bytes: a tokenizer.json, other files in its folder
_MOST_TEMPLATES, _MOST_NAME = 32, 99  # limits: templates of a folder, characters of a template's name
_GAP = 1 << 16  # maximum number of ids of a model beyond twice the number of tokens
_TYPE_NAMES = {list: "a list", dict: "an object", str: "a text", bool: "true or false", int: "a whole number"}
_UNSUPPORTED = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")


def tokenizer_from_json(path: str | Path, vocab_size: int | None = None) -> BPETokenizer:
    """Return the tokenizer of a tokenizer.json. Files next to it give special tokens and chat templates:
    tokenizer_config.json, chat_template.jinja, additional_chat_templates/, config.json and
    generation_config.json.

    `vocab_size`: size of the model's vocabulary, which unused tokens fill up. Raises UsageError unless the
    tokenizer is a byte-level BPE.
    """
    path = Path(path)
    content = _read(path, _MOST)
    model = _byte_level(path, content)
    added = _added_tokens(path, content)
    tokens, types = _vocabulary(path, model, added, vocab_size)
    pre, splitting = name_of(content.get("pre_tokenizer"), bool(model.get("ignore_merges")), str(path))
    flags = {token["content"]: [flag for flag in FLAGS if token.get(flag)] for token in added}
    metadata: dict[str, object] = {
        KEY + "model": "gpt2",
        KEY + "pre": pre,
        KEY + "tokens": tokens,
        KEY + "token_type": np.array(types, np.int32),
        KEY + "merges": [_merge(path, merge) for merge in _value(path, model, "merges", list) or []],
        **rules_json(flags, content.get("normalizer"), splitting),
        **_special(path, content, added),
        **_chat_template(path),
    }
    place = f"{path}: as a model file"
    tokenizer = BPETokenizer(metadata, place)
    lists = (_sibling(path, file).get("eos_token_id") for file in _MODEL_CONFIGS)
    listed = [end for ends in lists if isinstance(ends, list) for end in ends if type(end) is int]
    ends = [end for end in dict.fromkeys(listed) if 0 <= end < len(tokens) and end not in tokenizer.ends]
    keys = {f"{KEY}{name}_token_id": np.uint32(end) for name, end in zip(("eot", "eom"), ends, strict=False)}
    return BPETokenizer(metadata | keys, place) if keys else tokenizer


def tokenizer_json(metadata: Mapping[str, object], place: str = THE_FILE) -> dict[str, Any]:
    """Return the content of a tokenizer.json for the GGUF keys of a byte-level BPE or the byte tokenizer.

    Raises UsageError like `BPETokenizer`. Unused `[PADn]` are omitted, because readers fill the gaps.
    """
    bpe = BPETokenizer(metadata, place)
    tokenizer, lib = bpe.library, tokenizers()
    if bpe.add_bos and bpe.bos is not None:
        bos = bpe.tokens[bpe.bos]
        tokenizer.post_processor = lib.processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bpe.bos)]
        )
    return dict(json.loads(tokenizer.to_str()))


def tokenizer_config(metadata: Mapping[str, object], place: str = THE_FILE) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json: the special tokens as texts, and the chat template."""
    bpe = BPETokenizer(metadata, place)
    ids = {hf: bpe.special_id(gguf) for hf, gguf in _NAMES.items()}
    special = {f"{hf}_token": bpe.tokens[place] for hf, place in ids.items() if place is not None}
    GGUFKeys(metadata, place).text(TEMPLATE)  # raises an error if the template is not text
    templates = {
        key[len(TEMPLATE) + 1 :] or "default": text
        for key, text in metadata.items()
        if key.startswith(TEMPLATE)
    }
    template: Any = [{"name": name, "template": text} for name, text in templates.items()]
    if [*templates] == ["default"]:
        template = templates["default"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bpe.add_bos,
        **special,
        **({"chat_template": template} if templates else {}),
    }


def _read(path: Path, limit: int) -> dict[str, Any]:
    """Return the JSON object in a file. Raise UsageError for other content or more than `limit` bytes."""
    raw = read_file(path, limit, "JSON")
    try:
        content = parse_json(raw)
    except ValueError as error:
        raise UsageError(f"{path}: expected a JSON object, found invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: expected a JSON object, found {shown(content, 60)}")
    return content


def _sibling(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of another file in the same folder; {} if the file does not exist."""
    file = path.with_name(f"{name}.json")
    return _read(file, _MOST_SIBLING) if os.path.lexists(file) else {}


def _value(path: Path, content: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """Return the value of `name` if it has one of these types; None if missing; else raise UsageError."""
    value = content.get(name)
    if value is not None and type(value) not in kinds:
        names = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
        raise UsageError(f"{path}: {name}: expected {names}, found {shown(value, 60)}")
    return value


def _sibling_value(path: Path, file: str, name: str, *kinds: type) -> Any:
    return _value(path.with_name(f"{file}.json"), _sibling(path, file), name, *kinds)


def _byte_level(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the object `model`. Raise UsageError unless it is a byte-level BPE that a GGUF can describe."""
    raw = content.get("model")
    model: dict[str, Any] = raw if isinstance(raw, dict) else {}
    # Early files of this format have no type.
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind != "BPE" or not isinstance(model.get("vocab"), dict):
        raise UsageError(
            f"{path}: expected a tokenizer.json with a byte-level BPE, found the model {quoted(kind)}: "
            + _WAY_OUT
        )
    problem = next((f"{name} {shown(model[name], 100)}" for name in _UNSUPPORTED if model.get(name)), "")
    try:
        check_normalizer(content.get("normalizer"))
    except ValueError as error:
        problem = str(error)
    if problem:
        raise UsageError(f"{path}: expected a plain byte-level BPE, found {problem}: {_WAY_OUT}")
    return model


def _added_tokens(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens. Raise UsageError unless they are objects. As in Transformers, tokens of
    tokenizer_config.json are added too, and they replace tokens with the same text.
    """
    tokens = _value(path, content, "added_tokens", list) or []
    by_id = _sibling_value(path, _CONFIG, "added_tokens_decoder", dict) or {}
    for token in (*tokens, *by_id.values()):
        if not isinstance(token, dict):
            raise UsageError(f"{path}: added_tokens: expected objects, found {shown(token, 60)}")
    numbers = {text: int(text) if text.isdecimal() and len(text) < 10 else text for text in by_id}
    config = {str(token.get("content")): {"id": numbers[text]} | token for text, token in by_id.items()}
    merged = [token | config.pop(str(token.get("content")), {}) | {"id": token.get("id")} for token in tokens]
    return merged + sorted(config.values(), key=lambda token: str(token["id"]).zfill(9))


def _vocabulary(
    path: Path, model: dict[str, Any], added: list[dict[str, Any]], vocab_size: int | None
) -> tuple[list[str], list[int]]:
    """Return the tokens and their types in order of ids. Unused tokens fill the gaps."""
    vocabulary = _by_id(path, ((place, token) for token, place in model["vocab"].items()))
    extra = _by_id(path, ((token.get("id"), token.get("content")) for token in added))
    following = len(vocabulary)
    for place, token in extra.items():  # the id in the vocabulary or the next free id, as in the library
        number = model["vocab"].get(token, following)
        if place != number:
            raise UsageError(
                f"{path}: expected the added token {show(token)} with the id {number}, which is what the "
                f"package tokenizers gives it, found {place}: write the file with that package"
            )
        following += token not in model["vocab"]
    size = max([*vocabulary, *extra, -1]) + 1
    if size > 2 * len(vocabulary) + 1024:  # a real vocabulary has few gaps, and many gaps would waste memory
        raise UsageError(
            f"{path}: expected ids without large gaps, found {len(vocabulary)} tokens and the id {size - 1}"
        )
    if vocab_size is not None and vocab_size < size:
        raise UsageError(f"{path}: the tokenizer's {size} tokens exceed the model's vocabulary, {vocab_size}")
    if vocab_size is not None and vocab_size > 2 * size + _GAP:
        raise UsageError(
            f"{path}: expected a tokenizer for a vocabulary of {vocab_size}, found {size} tokens"
        )
    control = {token["id"] for token in added if token.get("special") or _looks_special(token["content"])}
    tokens, places = vocabulary | extra, range(vocab_size or size)
    types = dict.fromkeys(vocabulary, NORMAL) | dict.fromkeys(extra, USER_DEFINED)
    types |= dict.fromkeys(control, CONTROL)
    return [tokens.get(n, f"[PAD{n}]") for n in places], [types.get(n, UNUSED) for n in places]


def _by_id(path: Path, pairs: Iterable[tuple[Any, Any]]) -> dict[int, str]:
    """Return id -> token. Raise UsageError for values of another type or for a repeated id."""
    tokens: dict[int, str] = {}
    for place, token in pairs:
        if type(place) is not int or place < 0 or place in tokens or not is_text(token):
            pair = f"{quoted(token)} with id {quoted(place)}"
            raise UsageError(f"{path}: expected one token for each id from 0, found {pair}")
        tokens[place] = token
    return tokens


def _looks_special(token: str) -> bool:
    """Return whether llama.cpp's converter takes an added token for a control token by its spelling."""
    framed = token.startswith(("<|", "<｜")) and token.endswith(("|>", "｜>"))  # noqa: RUF001
    return framed or token in ("<pad>", "<mask>") or (token.startswith("<unused") and token.endswith(">"))


def _merge(path: Path, merge: object) -> str:
    """Return a merge as the text "a b"; newer files store two texts."""
    if isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge):
        return " ".join(merge)
    if not isinstance(merge, str):
        raise UsageError(f"{path}: expected merges as 'a b' or ['a', 'b'], found {shown(merge, 60)}")
    return merge


def _special(path: Path, content: dict[str, Any], added: list[dict[str, Any]]) -> dict[str, object]:
    """Return the GGUF keys of special tokens, found in tokenizer_config.json or the model's config files."""
    ids = {token["content"]: token["id"] for token in reversed(added)}
    first = _first_token(content.get("post_processor"))
    texts = {name: _content(_sibling_value(path, _CONFIG, f"{name}_token", str, dict)) for name in _NAMES}
    if not _sibling(path, _CONFIG):
        texts["bos"] = first
    keys: dict[str, object] = {KEY + "add_space_prefix": False}
    for hf, gguf in _NAMES.items():
        fields = [_sibling_value(path, file, f"{hf}_token_id", int, list) for file in _MODEL_CONFIGS]
        candidates = (ids.get(texts[hf]), *((_list(field) or [field])[0] for field in fields))
        numbers = [place for place in candidates if type(place) is int and 0 <= place < 1 << 32]
        if numbers:
            keys[f"{KEY}{gguf}_token_id"] = np.uint32(numbers[0])
    for name, is_first in {"bos": first is not None and first == texts["bos"], "eos": False}.items():
        flag = _sibling_value(path, _CONFIG, f"add_{name}_token", bool)
        adds = is_first if flag is None else flag
        keys[f"{KEY}add_{name}_token"] = adds and f"{KEY}{name}_token_id" in keys
    return keys


def _first_token(post: Any) -> str | None:
    """Return the special token that a post-processor puts before each text, or None."""
    for step in _list(post.get("processors", [post])) if isinstance(post, dict) else []:
        single = _list(step.get("single")) if isinstance(step, dict) else []
        head = single[0].get("SpecialToken") if len(single) > 1 and isinstance(single[0], dict) else None
        if isinstance(head, dict):
            return _content(head.get("id"))
    return None


def _chat_template(path: Path) -> dict[str, object]:
    """Return GGUF key -> template. As in Transformers, template files override tokenizer_config.json."""
    field = _sibling_value(path, _CONFIG, "chat_template", str, list)
    specs = field if isinstance(field, list) else [{"name": "default", "template": field}]
    templates = {str(spec.get("name")): spec.get("template") for spec in specs if isinstance(spec, dict)}
    paths = sorted(path.with_name("additional_chat_templates").glob("*.jinja"))[:_MOST_TEMPLATES]
    files = {"default": path.with_name("chat_template.jinja")} | {file.stem: file for file in paths}
    texts = {
        name: read_file(file, _MOST_SIBLING, "a chat template").decode("utf-8", "replace")
        for name, file in files.items()
        if os.path.lexists(file)
    }
    keys = {
        TEMPLATE if name == "default" else f"{TEMPLATE}.{name}": template
        for name, template in ({"default": templates.get("default"), **texts} if texts else templates).items()
        if isinstance(template, str) and len(name) <= _MOST_NAME
    }
    if not all(map(is_text, (*keys, *keys.values()))):
        raise UsageError(f"{path}: chat_template: expected text that UTF-8 can hold")
    return dict(keys)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
