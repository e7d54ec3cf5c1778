"""Inputs of a run: the model of `--init`, or the sizes of a new model, and the tokenizer of the text."""

import argparse
import hashlib
import json
import os
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.folder import CONFIG, HuggingFaceFolder
from zero_mpi.checkpoint.weights import GrownWeights, WeightSource, gguf_of, open_weights
from zero_mpi.config.bounds import rate_scales
from zero_mpi.config.optimizer import auxiliary_scales, rounding_of
from zero_mpi.config.settings import BYTE, FROM_INIT, OF_TEMPLATES, Config, spelled
from zero_mpi.data import (
    ByteTokenizer,
    Tokenizer,
    collect_files,
    holds_token_files,
    sources_of,
    tokenizer_from_json,
    tokenizer_from_metadata,
)
from zero_mpi.data.conversations.chat_template import DAY, TemplateInputs, asks_day, read_template
from zero_mpi.data.conversations.formats import are_conversations
from zero_mpi.data.corpus import tokenizers_of
from zero_mpi.data.token_formats import token_files
from zero_mpi.data.tokenizers.added_tokens import read_tokens
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import TEMPLATE, TOKENIZER, TOKENS, GGUFKeys
from zero_mpi.files.open import exists, is_file
from zero_mpi.files.parse import parse_json
from zero_mpi.models import ARCHITECTURES, ModelConfig, config_from_gguf
from zero_mpi.models.lora import HEAD, is_meant
from zero_mpi.models.model_config import EXPERTS, OPTIONAL, REQUIRED, check_blocks
from zero_mpi.nn.adapters import FIRST
from zero_mpi.ops.block_kinds import BLOCK_KINDS
from zero_mpi.optim.optimizer import check_scales
from zero_mpi.sharding.layout import check_patterns, is_trainable
from zero_mpi.telemetry import log

RESERVED = ("messages", "tools", "add_generation_prompt")  # template variables that a conversation sets
TOKENIZER_JSON = "tokenizer.json"


def open_init(config: Config) -> WeightSource | None:
    """Return the weights of `--init`, with the tokens of `--add-tokens`. Raise UsageError if invalid."""
    if config.init is None or config.add_tokens is None:
        return None if config.init is None else open_weights(config.init)
    if config.tokenizer not in (None, FROM_INIT):
        raise UsageError(f"--tokenizer {shown(config.tokenizer)}: leave out this flag or --add-tokens")
    return GrownWeights(open_weights(config.init), read_tokens(config.add_tokens))


def ignored_parts(init: WeightSource | None) -> list[str]:
    """Return notes on parts of a model that training ignores: dropout, or bytes after the last tensor."""
    init = init.base if isinstance(init, GrownWeights) else init
    if isinstance(init, GGUFFile) and init.surplus:
        return [f"{init.path}: {init.surplus} bytes after the last tensor are ignored"]
    if isinstance(init, HuggingFaceFolder) and init.dropout:
        return [f"{init.path / CONFIG} sets dropout ({init.dropout}), which is ignored"]
    return []


def read_model(init: WeightSource) -> ModelConfig:
    """Return the configuration of the model `init`. Raise UsageError if its tensors do not match it."""
    shapes = {name: tensor.shape for name, tensor in init.tensors.items()}
    model = config_from_gguf(init.metadata, shapes, str(init.path), init.read)
    model.check_tensors(shapes, str(init.path))
    return model


def adapted(config: Config, model: ModelConfig, init: WeightSource | None, device: str) -> ModelConfig:
    """Return the model with the adapters that the flags ask for. Raise UsageError if a flag does not fit.

    Frozen weights stay in their GGUF blocks if `device` has kernels for their type. With --qat,
    weights that are rounded but have no adapter become floats.
    """
    lora = config.adapters
    if lora is None:
        return model
    if init is None:
        raise UsageError(f"--lora {config.lora} needs a base model: add --init BASE.gguf (it stays frozen)")
    if isinstance(init, GrownWeights):
        lora = replace(lora, added=init.rows)
        if any(is_meant(HEAD, pattern) for pattern in lora.targets):
            raise UsageError(f"--lora-targets {HEAD}: cannot be combined with --add-tokens: leave it out")
    model = replace(model, lora=lora)
    if device == "cuda":
        return model
    names, kinds = model.params(), {} if config.qat is None else rounding_of(model, config.qat)
    stacks = [name for name in kinds if name + FIRST in names and len(names[name].shape) > 2]
    if stacks:
        raise UsageError(f"--lora-targets: {stacks[0]}: experts have no adapters with --qat: leave it out")
    lora = replace(lora, rounding=tuple((name, kind.name) for name, kind in kinds.items()))
    if gguf_of(init) is None:
        return replace(model, lora=lora)
    floats = {name for name in kinds if name + FIRST not in names}
    types = {name: init.tensors[name].type.name for name in names if name in init.tensors.keys() - floats}
    stored = tuple((name, BLOCK_KINDS[type]) for name, type in types.items() if type in BLOCK_KINDS)
    return replace(model, lora=replace(lora, stored=stored))


def shortened(config: Config, model: ModelConfig) -> Config:
    """Return the configuration with a default context that is at most the model's context."""
    if "context" not in config.default_names:
        return config
    return replace(config, context=min(config.context, model.context_length))


def check_model(config: Config, model: ModelConfig) -> None:
    """Raise UsageError for a context longer than the model's, or for invalid name patterns."""
    if config.context > model.context_length:
        raise UsageError(f"--context {config.context}: the model allows at most {model.context_length}")
    if model.lora is not None:
        model.lora.check(model.layers())
    auxiliary_scales(model, config)
    names = model.params()
    try:
        check_patterns("frozen", config.frozen, names)
    except ValueError as error:
        raise UsageError(f"--freeze: {error}") from error
    trained = [name for name in names if is_trainable(name, config.frozen)]
    if not trained:
        raise UsageError(f"--freeze {' '.join(config.frozen)}: leaves no parameter to train")
    try:
        check_scales("--lr-scale", rate_scales(config.lr_scale), trained)
    except ValueError as error:
        raise UsageError(str(error)) from error


def kept_as_floats(init: WeightSource | None, model: ModelConfig, device: str) -> list[str]:
    """Return a note on frozen tensors that are kept as floats: they lack a kernel, or --qat rounds them."""
    if model.lora is None or device == "cuda" or init is None or gguf_of(init) is None:
        return []
    floats = [name for name in model.params() if name in init.tensors and name not in model.stored]
    if not floats:
        return []
    types = ", ".join(sorted({init.tensors[name].type.name for name in floats}))
    return [f"{len(floats)} tensors of type {types} are kept as floats: no kernel exists, or --qat is on"]


def model_from_flags(config: Config, tokenizer: Tokenizer | None) -> ModelConfig:
    """Return the configuration that the flags give to a new model."""
    assert config.arch is not None, "only --init runs have no --arch"
    vocab_size = config.vocab_size if tokenizer is None else tokenizer.vocab_size
    sizes = {name: getattr(config, name) for name in (*REQUIRED, *OPTIONAL)} | {"vocab_size": vocab_size}
    return check_blocks(ARCHITECTURES[config.arch].from_flags(sizes))


def choose_tokenizer(
    config: Config, init: WeightSource | None, model: ModelConfig | None
) -> Tokenizer | None:
    """Return the data's tokenizer; None for token files without one. Raise UsageError if flags do not fit."""
    check_kind_of_data(config)
    if holds_token_files(config.data):
        tokenizer = tokenizer_of_ids(config, init, model)
        if tokenizer is None and init is None and config.vocab_size is None:
            raise UsageError("token files need --vocab-size V with --arch, or --init MODEL.gguf")
        return tokenizer
    if config.vocab_size is not None:
        raise UsageError("--vocab-size is for token files; text takes the tokenizer's vocabulary")
    tokenizer = fitting_tokenizer(config, init, model)
    if token_files(collect_files(config.val_data, "--val-data")):
        for path in tokenizers_of(config.val_data, "--val-data"):
            check_same_tokens("the tokenizer of --data", tokenizer, path, tokenizer_in(path))
    return tokenizer


def tokenizer_of_ids(
    config: Config, init: WeightSource | None, model: ModelConfig | None
) -> Tokenizer | None:
    """Return the flags' tokenizer, or else the one stored with the token files; None if none is stored.

    Raise UsageError if the flags' tokenizer and the files' tokenizer use an id for different tokens.
    """
    paths = [*tokenizers_of(config.data), *tokenizers_of(config.val_data, "--val-data")]
    pairs = [(path, tokenizer_in(path)) for path in paths]
    if not pairs:
        return None
    flag, tokenizer = "--data", with_template(pairs[0][1], config.chat_template)
    if config.tokenizer is not None or init is not None:
        flag = f"--tokenizer {config.tokenizer}" if config.tokenizer else f"--init {config.init}"
        tokenizer = fitting_tokenizer(config, init, model)
    elif config.vocab_size not in (None, tokenizer.vocab_size):
        raise UsageError(
            f"--vocab-size {config.vocab_size}: {pairs[0][0]} has {tokenizer.vocab_size} tokens: leave it out"
        )
    for path, file_tokenizer in pairs:
        check_same_tokens(shown(flag), tokenizer, path, file_tokenizer)
    return tokenizer


def check_same_tokens(flag: str, tokenizer: Tokenizer, path: Path, file_tokenizer: Tokenizer) -> None:
    """Raise UsageError if two tokenizers use an id for different tokens. Ids in only one of them are allowed.

    Two files of one model may differ in other keys, and a model may reserve ids for further tokens.
    """
    tokens, file_tokens = (GGUFKeys(t.metadata()).texts(TOKENS) or [] for t in (tokenizer, file_tokenizer))
    for place, (token, expected) in enumerate(zip(tokens, file_tokens, strict=False)):
        if token != expected:
            raise UsageError(
                f"{flag} does not match the token files: its token {place} is {show(token)}, but "
                f"{shown(path)} has {show(expected)}: tokenize the text again"
            )


def fitting_tokenizer(config: Config, init: WeightSource | None, model: ModelConfig | None) -> Tokenizer:
    """Return the tokenizer that the flags name. Raise UsageError if its size does not fit the model."""
    tokenizer = with_template(open_tokenizer(config, init, model), config.chat_template)
    if model is not None and tokenizer.vocab_size != model.vocab_size:
        raise UsageError(
            f"--tokenizer {shown(config.tokenizer or FROM_INIT)} has {tokenizer.vocab_size} tokens, but the "
            f"model of {shown(config.init)} has {model.vocab_size}: use --tokenizer from-init or other --data"
        )
    return tokenizer


def open_tokenizer(config: Config, init: WeightSource | None, model: ModelConfig | None) -> Tokenizer:
    """Return the tokenizer that the flags name. By default it is the model's own, if there is a model."""
    name = config.tokenizer or (BYTE if init is None else FROM_INIT)
    if name == BYTE:
        return ByteTokenizer()
    if name != FROM_INIT:
        return tokenizer_from_file(Path(name))
    if init is None or model is None:
        raise UsageError("--tokenizer from-init needs --init MODEL.gguf")
    return tokenizer_of(init, model)


def check_kind_of_data(config: Config) -> None:
    """Raise UsageError for a flag that has no effect on this kind of data."""
    chats = kinds_of_data(config)
    no_chats = "--data has no conversations (.jsonl files)"
    rules = dict.fromkeys((*OF_TEMPLATES, "loss_on", "system", "skip_bad"), no_chats)
    rules["control_tokens"] = "--data has conversations, whose template writes the tokens: leave the flag out"
    for name, reason in rules.items():
        idle = all(chats) if name == "control_tokens" else not any(chats)
        value = getattr(config, name)
        if value not in (None, False, [], DAY) and idle:
            raise UsageError(f"{spelled(name)}{'' if value is True else f' {shown(value)}'}: {reason}")


def kinds_of_data(config: Config) -> list[bool]:
    """Return one bool per source: True if it has conversations or, for a preference loss, pairs."""
    pairs = config.preference is not None
    return [pairs or are_conversations(collect_files(source.paths)) for source in sources_of(config.data)]


def template_inputs(options: Config | argparse.Namespace, tokenizer: Tokenizer | None) -> TemplateInputs:
    """Return the values that flags set for chat templates. Raise UsageError for an invalid value."""
    variables: dict[str, Any] = {}
    for text in options.template_var or ():
        name, _, value = text.partition("=")
        if "=" not in text or not name.isidentifier() or name in RESERVED:
            reserved = ", ".join(RESERVED)
            raise UsageError(
                f"--template-var {shown(text)}: expected NAME=VALUE, with NAME not one of {reserved}"
            )
        try:
            variables[name] = parse_json(value)
        except ValueError:
            variables[name] = value
    if options.enable_thinking:
        variables["enable_thinking"] = options.enable_thinking == "true"
    day = options.template_date
    if day is None:
        day = date.today().isoformat() if tokenizer is not None and asks_day(tokenizer) else DAY
    try:
        return TemplateInputs(variables, options.system, date.fromisoformat(day).isoformat())
    except ValueError:
        raise UsageError(f"--template-date {shown(day)}: expected a date such as {DAY}") from None


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    """Return the tokenizer with a template: a file, or the name of a template; None: no change."""
    if template is None:
        return tokenizer
    keys = tokenizer.metadata()
    text = None if os.path.isfile(template) else keys.get(f"{TEMPLATE}.{template}")
    rest = {key: value for key, value in keys.items() if not key.startswith(TEMPLATE)}
    return tokenizer_from_metadata(rest | {TEMPLATE: read_template(template) if text is None else text})


def tokenizer_of(source: WeightSource, model: ModelConfig) -> Tokenizer:
    """Return the tokenizer that came with a model, in its keys or in a tokenizer.json in its folder."""
    path = source.path / TOKENIZER_JSON
    if is_file(path) and not has_tokenizer(source):
        return tokenizer_from_json(path, model.vocab_size)
    return tokenizer_from_metadata(source.metadata, str(source.path))


def carried_keys(init: HuggingFaceFolder, model: ModelConfig) -> dict[str, object]:
    """Return the keys of a folder's tokenizer, for a run on token files, which does not use a tokenizer.

    llama.cpp, `generate` and `export` need them to read the checkpoints. If the folder has no tokenizer that
    keys can describe, log a warning and return the key with which llama.cpp works without a tokenizer.
    """
    path = init.path / TOKENIZER_JSON
    problem = f"{init.path} has no {TOKENIZER_JSON}"
    try:
        if path.exists():
            return tokenizer_from_json(path, model.vocab_size).metadata()
    except UsageError as error:
        problem = str(error)
    log.warning("%s: checkpoints will have no tokenizer, so they cannot generate text", problem)
    return {TOKENIZER: "none"}


def tokenizer_from_file(path: Path) -> Tokenizer:
    """Return the tokenizer in a GGUF file or a tokenizer.json. Raise UsageError if there is no such file."""
    if not exists(path):
        raise UsageError(
            f"--tokenizer {shown(path)}: no such file; expected byte, from-init, a GGUF or a tokenizer.json"
        )
    return tokenizer_in(path)


def tokenizer_in(path: str | Path) -> Tokenizer:
    """Return the tokenizer in a file, whose name shows the format. Raise UsageError if there is none."""
    if str(path).endswith(".json"):
        return tokenizer_from_json(path)
    return tokenizer_from_metadata(GGUFFile.open(path).metadata, str(path))


def has_tokenizer(init: WeightSource) -> bool:
    return GGUFKeys(init.metadata, str(init.path)).text(TOKENIZER) is not None


def fingerprint(tokenizer: Tokenizer | None) -> str:
    """Return a digest of the tokenizer. A resumed run compares it, because texts must give the same ids."""
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        return "none" if tokenizer is None else BYTE
    keys = {key: value for key, value in tokenizer.metadata().items() if "template" not in key}
    text = json.dumps(keys, sort_keys=True, default=lambda value: value.tolist())  # converts NumPy values
    return hashlib.sha256(text.encode()).hexdigest()[:32]


SIZES = {  # flag -> attribute of the model
    "arch": "arch",
    "layers": "block_count",
    "dim": "embedding_length",
    "heads": "head_count",
    "kv_heads": "head_count_kv",
    "ffn": "feed_forward_length",
    "experts": "expert_count",
    "experts_used": "expert_used_count",
    "expert_ffn": "feed_forward_length",
    "tied": "tied",
    "vocab_size": "vocab_size",
}


def sizes_of(model: ModelConfig) -> dict[str, Any]:
    """Return flag -> size of the model. Without `kv_heads`, each query head has its own key/value head.

    The flags of experts are None for a model without experts.
    """
    sizes = {name: getattr(model, size, None) for name, size in SIZES.items()}
    absent = () if sizes["experts"] else EXPERTS
    return sizes | {"kv_heads": sizes["kv_heads"] or model.head_count} | dict.fromkeys(absent)


def settled(config: Config, model: ModelConfig) -> Config:
    """Return the configuration with the sizes of the model of `--init`, if there is such a model.

    Raise UsageError if a flag contradicts these sizes. The vocabulary size comes from the tokenizer.
    """
    if config.init is None:
        return config
    sizes = sizes_of(model)
    for name, size in sizes.items():
        flag = getattr(config, name)
        if flag is not None and flag != size:
            raise UsageError(
                f"{as_flag(name, flag)}: the model of --init {config.init} has {as_flag(name, size)}; leave "
                "it out, or train a new model without --init"
            )
    return replace(config, **{name: sizes[name] for name in SIZES if name != "vocab_size"})


def as_flag(name: str, value: Any) -> str:
    """Return a setting as a flag on a command line."""
    if value is None:
        return f"no {spelled(name)}"
    if isinstance(value, bool):
        return spelled(name if value else f"no-{name}")
    return f"{spelled(name)} {value}"
