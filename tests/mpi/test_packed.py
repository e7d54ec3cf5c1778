"""Training on packed documents, with a loss on some or all tokens, is bit-identical to one process."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import tiny

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, GradAccum, SerialComm, ShardedAdamW
from zero_mpi.data import EvalLoader, PackedWindows, StepLoader
from zero_mpi.data.documents import Document, stream_of
from zero_mpi.sharding.rounds import ordered_total, part_losses
from zero_mpi.train.objective import with_loss

CONTEXT, STEPS = 40, 3
MODELS = {name: replace(config, context_length=CONTEXT) for name, config in tiny.MODELS.items()}


def windows(counts):
    """Return windows of documents of many lengths; with `counts` only some tokens count in the loss."""
    rng = np.random.default_rng(0)
    documents = []
    for number in range(60):
        ids = rng.integers(61, size=rng.integers(2, 70))
        mask = rng.random(ids.size) < rng.random() if counts else None
        if mask is not None:
            mask[0], mask[1] = False, True
        documents.append(Document(str(number), ids, b"", mask))
    return PackedWindows(stream_of(documents), CONTEXT)


def train(comm, name, strategy=FULL_SHARD, counts=True, **options):
    corpus = windows(counts)
    module = tiny.make(comm, MODELS[name], strategy, **options)
    optimizer, loader = ShardedAdamW(module, lr=1e-2), StepLoader(corpus, batch_size=9, micro_batch=2, seed=3)
    accumulator, records = GradAccum(module, loader.micro_batches), []
    for step in range(STEPS):
        for n in accumulator:
            args = (None,) if n is None else with_loss(loader.micro(step, n), 1 / loader.counted(step))
            accumulator.accumulate(*args)
        records.append((accumulator.total_loss(), optimizer.step(max_norm=1.0).grad_norm))
    val = EvalLoader(corpus, 2, 7)
    count, scale = val.micro_batches, 1 / val.counted
    loss = ordered_total(part_losses(module, count, count, lambda i: (*with_loss(val.micro(i), scale), i)))
    return records, loss, tiny.digest(module.state_dict())


@functools.cache
def alone(name, counts):
    return train(SerialComm(), name, counts=counts)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize(("name", "counts"), [("llama", True), ("gpt2 tied", True), ("qwen3", False)])
def test_losses_norms_and_weights(exact, name, counts, strategy):
    assert train(exact, name, strategy, counts, recompute=strategy is NO_SHARD) == alone(name, counts)
