"""Text generation in one process, with a key/value cache.

The layers are those of training. Each attention layer keeps the keys and values of earlier positions in the
cache. When the context is full, its newest half is computed again and generation continues.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.weights import TOKENS_ADDED, MergedWeights, WeightSource, lora_of, open_weights
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.models import config_from_gguf
from zero_mpi.nn.decoding import Batch, Decoder, Unrecorded
from zero_mpi.nn.linear import is_adapter
from zero_mpi.ops.block_kinds import finite_blocks
from zero_mpi.ops.packed_matrix import PackedMatrix, packs

# Below this, the most likely token is always drawn, as distinct float32 logits differ by at least 1e-45.
COLDEST = 1e-48


def choose(
    logits: Array,
    generator: np.random.Generator,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """Return an id drawn with the weights that `weights_of` returns; temperature 0: the most likely id."""
    if temperature < COLDEST:
        return int(np.argmax(logits))
    weights = weights_of(logits, temperature, top_k, top_p, min_p)
    return int(generator.choice(weights.size, p=weights / weights.sum()))


def weights_of(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """Return weights (V,) float64: exp(logits / temperature) of kept ids, up to a factor; 0 for all others.

    logits (V,), finite. `top_k`: keep the k most likely ids (0: all); `top_p`: of these, keep the fewest
    whose probabilities reach it; `min_p`: keep ids with at least this fraction of the greatest probability.
    """
    offsets = logits.astype(np.float64) - float(logits.max())
    ids = nucleus(likeliest(logits, top_k), offsets, top_p)
    if min_p > 0:  # Nguyen et al., "Turning Up the Heat: Min-p Sampling ...", 2024
        ids = ids[offsets[ids] >= math.log(min_p)]
    weights = np.zeros(logits.size)
    weights[ids] = np.exp(offsets[ids] / temperature)
    return weights


def likeliest(logits: Array, top_k: int) -> Any:
    """Return the ids of the `top_k` largest logits, sorted by id; 0 returns all ids."""
    if not 0 < top_k < logits.size:
        return np.arange(logits.size)
    threshold = np.partition(logits, -top_k)[-top_k]
    larger, equal = np.flatnonzero(logits > threshold), np.flatnonzero(logits == threshold)
    return np.sort(np.concatenate((larger, equal[: top_k - larger.size])))


def nucleus(ids: Any, offsets: Array, top_p: float) -> Any:
    """Return the fewest of `ids`, the most likely first, whose probabilities sum to `top_p`; at least one.

    Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019.
    """
    if top_p >= 1:
        return ids
    ids = ids[np.argsort(-offsets[ids], kind="stable")]
    shares = np.cumsum(np.exp(offsets[ids]))
    return ids[: np.searchsorted(shares, top_p * shares[-1]) + 1]


def weight_of(file: WeightSource, name: str) -> Array | PackedMatrix:
    """Return a tensor of the file. Raise UsageError if it has values that are not finite."""
    weight: Array | PackedMatrix
    spec = file.tensors[name]
    if isinstance(file, GGUFFile) and packs(spec.type.name, spec.shape):
        raw = np.empty(spec.nbytes, np.uint8)
        file.read_bytes(name, 0, raw)
        weight = PackedMatrix(raw.reshape(spec.shape[0], -1), spec.type.name)
        is_finite = bool(finite_blocks(raw, spec.type.name).all())
    else:
        weight = file.tensor(name)
        is_finite = bool(np.isfinite(weight).all())
    if not is_finite:
        raise UsageError(f"{file.path}: tensor {name} holds values that are not finite")
    return weight


class TextModel:
    """A model from any source of `open_weights`. Quantized matrices of a GGUF stay in their blocks.

    `adapter`: an adapter for this model, computed separately; it is merged only if it adds tokens. Raises
    UsageError if the model cannot be run.
    """

    def __init__(self, source: str | Path | WeightSource, adapter: WeightSource | None = None) -> None:
        self.file = open_weights(source) if isinstance(source, str | Path) else source
        if adapter is not None and TOKENS_ADDED in adapter.metadata:
            self.file, adapter = MergedWeights(self.file, adapter), None
        place = str(source) if isinstance(source, str | Path) else str(source.path)
        shapes = {name: tensor.shape for name, tensor in self.file.tensors.items()}
        self.config = config_from_gguf(self.file.metadata, shapes, place, self.file.read)
        self.config.check_tensors(shapes, place)
        if adapter is not None:
            self.config = replace(self.config, lora=lora_of(adapter))
        self.stages = self.config.stages()
        self.weights = {
            name: weight_of(self.file if adapter is None or not is_adapter(name) else adapter, name)
            for name in self.config.params()
        }
        self.reset()

    def reset(self) -> None:
        self.decoder, self.ids = Decoder(self.stages, self.weights), list[int]()

    def _finite(self, outputs: Array) -> Array:
        if not np.isfinite(outputs).all():
            raise UsageError(f"{self.file.path}: the model's output is not finite: its weights are damaged")
        return outputs

    def logits(self, ids: Sequence[int] | Array) -> Array:
        """Return the logits (T, V) of `ids` (T,), which continue the ids of earlier calls.

        Raises ValueError if the positions exceed the model's context.
        """
        end = self.decoder.cache.position + len(ids)
        if end > self.config.context_length:
            raise ValueError(f"{end} positions exceed the context of {self.config.context_length}")
        with np.errstate(all="ignore"):  # `_finite` reports an overflow
            x = self._finite(self.decoder.read(np.asarray(ids, np.int64)))
        self.ids += np.asarray(ids).tolist()
        return x

    def generate(
        self, prompt: Sequence[int] | Array, tokens: int, *, seed: int = 0, **draw: Any
    ) -> Iterator[int]:
        """Yield `tokens` ids that continue `prompt` (at least one id). `draw`: arguments of `choose`.

        If the prompt begins with all ids that the model has read so far, as in a conversation's next turn,
        the model only reads the new ids.
        """
        if not len(prompt):
            raise UsageError("the prompt is empty: give at least one token")
        generator = np.random.default_rng(seed)
        context = self.config.context_length
        history = [int(i) for i in prompt]
        count = len(self.ids)
        if count == len(history) or history[:count] != self.ids:
            self.reset()
        new_ids = history[len(self.ids) :]
        for _ in range(tokens):
            if self.decoder.cache.position + len(new_ids) > context:
                self.reset()
                new_ids = history[-max(1, context // 2) :]
            logits = self.logits(new_ids)[-1]
            token = choose(logits, generator, **draw)
            history.append(token)
            new_ids = [token]
            yield token

    def generate_each(
        self,
        prompts: Sequence[Sequence[int] | Array],
        tokens: int,
        ends: Collection[int] = (),
        *,
        seed: int = 0,
        **draw: Any,
    ) -> list[list[int]]:
        """Return the ids of `generate` for each prompt, up to and including the first id in `ends`.

        All prompts are computed together if the model supports this and the context is long enough.
        """
        rows = [np.asarray(prompt, np.int64) for prompt in prompts]
        fits = max(map(len, rows)) + tokens <= self.config.context_length and min(map(len, rows)) > 0
        try:
            batch = Batch(self.stages, self.weights, rows, tokens) if fits else None
        except Unrecorded:
            batch = None
        answers: list[list[int]] = [[] for _ in rows]
        if batch is None:
            for ids, prompt in zip(answers, prompts, strict=True):
                for token in self.generate(prompt, tokens, seed=seed, **draw):
                    ids.append(token)
                    if token in ends:
                        break
            return answers
        generators = [np.random.default_rng(seed) for _ in rows]
        for _ in range(tokens):
            choices = [
                choose(*pair, **draw) for pair in zip(self._finite(batch.outputs), generators, strict=True)
            ]
            for ids, token in zip(answers, choices, strict=True):
                if not ids or ids[-1] not in ends:
                    ids.append(token)
            if all(ids[-1] in ends for ids in answers):
                break
            batch.read(np.array(choices))
        return answers
