"""Models to evaluate: opened, their sizes known and their tokens compared; no weights are read yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.checkpoint.weights import WeightSource, adapter_source, open_merged, weights_digest
from zero_mpi.comm.agree import Facts
from zero_mpi.commands.evaluate.task import MOST_CONTEXT, Task
from zero_mpi.config.inputs import (
    check_kind_of_data,
    check_same_tokens,
    fitting_tokenizer,
    read_model,
    tokenizer_in,
    tokenizer_of,
)
from zero_mpi.config.settings import Config
from zero_mpi.data import Tokenizer, holds_token_files
from zero_mpi.data.control_tokens import ALWAYS, AUTO
from zero_mpi.data.sources import tokenizers_of
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import TOKENS
from zero_mpi.launch.consistency import short_digest
from zero_mpi.models import ModelConfig
from zero_mpi.train.description import what_was_read
from zero_mpi.train.resolve import set_threads
from zero_mpi.train.resume import settled_bos
from zero_mpi.train.transport import check_wish

# Keys of a tokenizer that decide about ids; the need for bos is reported apart.
DECIDES = tuple(
    "tokenizer.ggml." + each
    for each in ("model", "pre", "merges", "scores", "token_type", "bos_token_id", "eos_token_id")
)
LONGEST_NAME = 40  # letters of a model's path that are shown in a table


@dataclass(frozen=True)
class Candidate:
    """Model to evaluate. path, lora: as given; source: its weights; model: its sizes."""

    path: str
    source: WeightSource
    model: ModelConfig
    lora: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer that came with the model; None if there is none that can be read."""
        try:
            found = tokenizer_of(self.source, self.model)
        except UsageError:
            return None
        return found if found.vocab_size == self.model.vocab_size else None

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of that tokenizer, if there is one."""
        return {} if self.tokenizer is None else self.tokenizer.metadata()

    @property
    def tokens(self) -> list[str]:
        """Texts of its tokens, as far as they are known."""
        found = self.keys.get(TOKENS)
        return found if isinstance(found, list) else []

    @property
    def name(self) -> str:
        """Path for messages."""
        return shown(self.title, LONGEST_NAME)

    @property
    def title(self) -> str:
        """Paths of model and adapter."""
        return self.path if self.lora is None else f"{self.path} + {self.lora}"


@dataclass(frozen=True)
class Opened:
    """Findings of a rank before anything large is read.

    config      the settings, with the tokens of a window
    candidates    the model, and the one that it is compared with
    tokenizer   tokenizer of text; for data of ids, the one that knows their bytes, or None
    threads     number of threads that this rank computes on
    """

    config: Config
    candidates: tuple[Candidate, ...]
    tokenizer: Tokenizer | None
    threads: int


def look(task: Task, number: int) -> tuple[Opened, Facts]:
    """Return what this rank finds by itself, and the facts that all ranks must share; raises UsageError.

    `number`: index of the rank on its node, where the launcher does not tell it.
    """
    device.use(task.config.device, number)
    check_wish(task.config)
    threads = set_threads(task.config)
    asked = (task.config.init, task.lora), (task.against, None)
    opened = [(path, open_merged(path, lora), lora) for path, lora in asked if path is not None]
    candidates = tuple(Candidate(path, source, read_model(source), lora) for path, source, lora in opened)
    tokenizer = choose_tokenizer(task, candidates[0])
    for base in candidates[1:]:
        check_same_vocabulary(candidates[0], base)
    bos = settled_bos(task.config, tokenizer, None)
    config = replace(task.config, context=window_length(task, candidates), bos=bos)
    facts: dict[str, object] = {}
    for candidate in candidates:
        of_model = replace(config, init=candidate.path)
        facts |= what_was_read(of_model, None, candidate.source, candidate.model, tokenizer)
        if candidate.lora is not None:
            adapter = adapter_source(candidate.lora, candidate.source.metadata)
            facts[f"the adapter of --lora {candidate.lora}"] = weights_digest(adapter)
    return Opened(config, candidates, tokenizer, threads), {
        name: short_digest(value) for name, value in facts.items()
    }


def choose_tokenizer(task: Task, candidate: Candidate) -> Tokenizer | None:
    """Return the tokenizer for text and questions; for ids alone the model's own, if it can be read.

    Raises UsageError if ids mean other tokens to the model than to the maker of the token files.
    """
    config = task.config
    check_kind_of_data(config)
    if task.choices is not None or not holds_token_files(config.data):
        found: Tokenizer | None = fitting_tokenizer(config, candidate.source, candidate.model)
    else:
        found = candidate.tokenizer
    for path in tokenizers_of(config.data):
        if found is not None:
            check_same_tokens(shown(candidate.path), found, path, tokenizer_in(path))
    return found


def check_same_vocabulary(candidate: Candidate, base: Candidate) -> None:
    """Raise UsageError unless two models have the same tokens, as far as their files say."""
    sizes = candidate.model.vocab_size, base.model.vocab_size
    odd = f"{sizes[1]} tokens, expected {sizes[0]}"
    if sizes[0] == sizes[1]:
        pairs = enumerate(zip(candidate.tokens, base.tokens, strict=False))
        different = ((place, pair) for place, pair in pairs if pair[0] != pair[1])
        place, (expected, found) = next(different, (0, ("", "")))
        odd = f"token {place} is {show(found)}, expected {show(expected)}" if expected != found else ""
    if odd:
        raise UsageError(
            f"--against {shown(base.path)}: {odd} as in {shown(candidate.path)}: only models with the same "
            "tokens can be compared"
        )


def cautions(task: Task, opened: Opened) -> Iterator[str]:
    """Yield a line for each thing that the user may not expect of bos and of two tokenizers."""
    config, path = task.config, shown(task.against or "")
    if config.bos == ALWAYS and config.data and holds_token_files(config.data):
        yield f"--bos {ALWAYS}: no BOS token is added to token files"
    found = [each.tokenizer for each in opened.candidates]
    asks = [each is not None and each.add_bos for each in found]
    if config.bos == AUTO and len({*asks}) > 1:
        one, other = (opened.candidates[asks.index(wanted)].name for wanted in (True, False))
        yield (
            f"--against: {one} expects a BOS token, {other} does not: both are read like the first; set "
            "--bos always or never for both"
        )
    ours, *theirs = (each.keys for each in opened.candidates)
    differ = sorted(
        key
        for each in theirs
        for key in ours.keys() & each.keys()
        if key.startswith(DECIDES) and not np.array_equal(ours[key], each[key])
    )
    if differ:
        yield (
            f"--against {path}: {', '.join(differ)} differ from {opened.candidates[0].name}: both models "
            "read the tokens of the first one's tokenizer"
        )


def window_length(task: Task, candidates: tuple[Candidate, ...]) -> int:
    """Return the tokens of a window; raises UsageError if a model has positions for fewer."""
    rooms = [candidate.model.context_length for candidate in candidates]
    wanted = task.context or min(MOST_CONTEXT, *rooms)
    for candidate, room in zip(candidates, rooms, strict=True):
        if wanted > room:
            raise UsageError(f"--context {wanted}: the model {shown(candidate.path)} allows at most {room}")
    return wanted
