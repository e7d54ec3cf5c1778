"""Llama whose blocks have a router that only counts and has losses, as a command:

mpiexec -n 2 python tests/routed_llama.py --arch routed-llama ...
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zero_mpi.models import ARCHITECTURES, Llama
from zero_mpi.nn import Chain, Layer, Param, batch_of
from zero_mpi.nn.balance import RouterLosses

EXPERTS, USED = 5, 2


class Router(Layer):
    """y = x; logits = x w^T are those of a router that uses two of five experts."""

    def __init__(self, prefix, width):
        self.weight, self.width = f"{prefix}.ffn_gate_inp.weight", width
        self.losses = RouterLosses(prefix, EXPERTS)

    def params(self):
        return {self.weight: Param((EXPERTS, self.width), std=0.3)}

    def tallies(self):
        return self.losses.tallies()

    def forward(self, p, x):
        rows = x.reshape(-1, self.width)
        logits = rows @ p[self.weight].T
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        chosen = np.argsort(-weights, axis=-1, kind="stable")[:, :USED]
        starts = np.searchsorted(np.sort(chosen.ravel()), np.arange(EXPERTS + 1))
        self.losses.report(batch_of(p), logits, weights, chosen, starts)
        return x, (rows, logits, weights)

    def backward(self, p, saved, dy, g):
        rows, logits, weights = saved
        dlogits = np.zeros_like(logits)
        self.losses.add_gradient(batch_of(p), dlogits, logits, weights)
        if self.weight in g:
            g[self.weight] += dlogits.T @ rows
        return dy + (dlogits @ p[self.weight]).reshape(dy.shape)


@dataclass(frozen=True)
class RoutedLlama(Llama):
    arch: ClassVar[str] = "routed-llama"

    def feed_forward(self, prefix):
        return Chain(super().feed_forward(prefix), Router(prefix, self.embedding_length))


ARCHITECTURES[RoutedLlama.arch] = RoutedLlama

if __name__ == "__main__":
    from zero_mpi.train.command import main

    main()
