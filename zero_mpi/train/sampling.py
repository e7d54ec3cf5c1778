"""Which token comes next: what is kept of a model's logits, and the draw from it.

The samplers and their order are llama.cpp's: top-k, top-p, min-p, each of what the one before has left, by
the probabilities that the model itself gives; then the temperature, then the draw. Of equally likely tokens
the lowest ids go first, so what is kept is always the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from zero_mpi.device.types import Array

# Below it nothing but the likeliest is ever drawn: two float32 logits that differ do so by 1e-45 at least.
COLDEST = 1e-48


def choose(
    logits: Array,
    temperature: float,
    top_k: int,
    generator: np.random.Generator,
    *,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """An id drawn by `weights_of` the logits; temperature 0: the likeliest."""
    if temperature < COLDEST:
        return int(np.argmax(logits))
    weights = weights_of(logits, temperature, top_k, top_p, min_p)
    return int(generator.choice(weights.size, p=weights / weights.sum()))


def weights_of(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """exp(logits / temperature) of what is kept, up to a factor, and 0 of the rest; (V,) float64.

    logits (V,), finite. `top_k`: of the likeliest so many, 0 all; `top_p`: of them the fewest whose
    probabilities make up so much; `min_p`: of them those with so large a share of the largest probability.
    """
    below = logits.astype(np.float64) - float(logits.max())
    kept = not_far_below(nucleus(likeliest(logits, top_k), below, top_p), below, min_p)
    weights = np.zeros(logits.size)
    weights[kept] = np.exp(below[kept] / temperature)
    return weights


def likeliest(logits: Array, top_k: int) -> Any:
    """Exactly `top_k` ids of the largest logits, in order of ids; 0: all."""
    if not 0 < top_k < logits.size:
        return np.arange(logits.size)
    least = np.partition(logits, -top_k)[-top_k]
    above, equal = np.flatnonzero(logits > least), np.flatnonzero(logits == least)
    return np.sort(np.concatenate((above, equal[: top_k - above.size])))


def nucleus(ids: Any, below: Array, top_p: float) -> Any:
    """The fewest of `ids`, likeliest first, whose probabilities among them reach `top_p`; at least one.

    Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019.
    """
    if top_p >= 1:
        return ids
    ids = ids[np.argsort(-below[ids], kind="stable")]
    shares = np.cumsum(np.exp(below[ids]))
    return ids[: np.searchsorted(shares, top_p * shares[-1]) + 1]


def not_far_below(ids: Any, below: Array, min_p: float) -> Any:
    """Those of `ids` whose probability is at least `min_p` times the largest.

    Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs", 2024.
    """
    return ids if min_p <= 0 else ids[below[ids] >= math.log(min_p)]
