"""A model with rows for added tokens: a `WeightSource` over the file that lacks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface.folder import EMBEDDING, HEAD, HuggingFaceFolder
from zero_mpi.checkpoint.tensor_file import CHUNK, Floats, Readable, TensorSpec
from zero_mpi.data import tokenizer_from_json
from zero_mpi.data.tokenizers.added_tokens import with_tokens
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import TOKENIZER
from zero_mpi.nn.added_rows import ADDED

TOKENS_ADDED = "adapter.lora.added_tokens"  # key of an adapter that was trained with them


class GrownWeights(Readable):
    """The weights and keys of `base` with `tokens` from id `first` on, which have rows in embedding and head.

    Rows of new tokens begin as the mean of the rows before them. `trained`, an adapter's checkpoint, replaces
    all rows from `first` on by its tensors `NAME.added`. `read` takes these names too.
    """

    def __init__(self, base: Any, tokens: Sequence[str], trained: Any = None) -> None:
        self.base, self.tokens, self.path, self._trained = base, list(tokens), base.path, trained
        self._means: dict[str, Floats] = {}
        keys, old = base.metadata, base.tensors[EMBEDDING].shape[0]
        if isinstance(base, HuggingFaceFolder) and TOKENIZER not in keys:
            keys = {**keys, **tokenizer_from_json(base.path / "tokenizer.json", old).metadata()}
        self.metadata, self.first = with_tokens(keys, tokens, str(base.path))
        self.rows = max(old, self.first + len(tokens)) - self.first
        self.tensors: dict[str, Any] = dict(base.tensors)
        for name in {EMBEDDING, HEAD} & base.tensors.keys():
            spec = base.tensors[name]
            self.tensors[name] = replace(spec, shape=(self.first + self.rows, spec.shape[1]))
            shape = None if trained is None else trained.spec(name + ADDED).shape
            if shape not in (None, (self.rows, spec.shape[1])):
                raise UsageError(f"{base.path}: expected the model whose {self.rows} rows were added")

    def spec(self, name: str) -> TensorSpec:
        whole = name.removesuffix(ADDED)
        spec: TensorSpec = self.tensors[whole]
        return spec if whole == name else replace(spec, name=name, shape=(self.rows, spec.shape[1]))

    def fill(self, spec: TensorSpec, start: int, out: Floats) -> None:
        name = spec.name.removesuffix(ADDED)
        if name not in (EMBEDDING, HEAD):
            self.base.read(name, start, start + out.size, out)
            return
        border = self.first * spec.shape[1]
        start += border if spec.name != name else 0
        cut = min(out.size, max(0, border - start))
        self.base.read(name, start, start + cut, out[:cut])
        if cut < out.size:
            out[cut:] = self._later(name, start + cut - border, start + out.size - border)

    def _later(self, name: str, start: int, stop: int) -> Floats:
        """Return elements [start, stop) of the rows from the first new one on."""
        if self._trained is not None:
            found: Floats = self._trained.read(name + ADDED, start, stop)
            return found
        spec, new = self.base.tensors[name], len(self.tokens)
        if name not in self._means:
            self._means[name] = self._mean(name)
        rows = np.tile(self._means[name], (self.rows, 1))
        if self.rows > new:  # unused ones behind the new tokens
            rows[new:] = self.base.read(name, (self.first + new) * spec.shape[1]).reshape(-1, spec.shape[1])
        return rows.reshape(-1)[start:stop]

    def _mean(self, name: str) -> Floats:
        """Return the mean (C,) of the rows before the first new one, summed in float64 in their order."""
        width = self.base.tensors[name].shape[1]
        total, size = np.zeros(width), max(1, CHUNK // width)
        for at in range(0, self.first, size):
            rows = self.base.read(name, at * width, min(at + size, self.first) * width)
            total += rows.reshape(-1, width).sum(axis=0, dtype=np.float64)
        return (total / self.first).astype(np.float32)


def gguf_of(source: Any) -> GGUFFile | None:
    """Return the GGUF in which the weights of a source lie, None for another format."""
    file = source.base if isinstance(source, GrownWeights) else source
    return file if isinstance(file, GGUFFile) else None


def tokens_of(source: Any) -> list[str]:
    """Return the tokens that were added to a source."""
    return source.tokens if isinstance(source, GrownWeights) else []
