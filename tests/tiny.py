"""Tiny models with odd sizes and training loops on them, shared by the tests."""

import hashlib
from dataclasses import replace
from functools import partial

import architectures
import numpy as np

from zero_mpi import FULL_SHARD, GradAccum, SerialComm, ShardedAdamW, ShardedModule, cross_entropy, device
from zero_mpi.models import GPT2, Llama, Qwen2, Qwen3
from zero_mpi.models.lora import LoRA

LLAMA = {"layers": 2, "dim": 30, "heads": 3, "kv_heads": 1, "ffn": 97, "context": 11, "vocab_size": 61}
GPT = {"layers": 2, "dim": 36, "heads": 3, "ffn": 97, "context": 11, "vocab_size": 61}
MODELS = {
    "llama": Llama.from_flags(LLAMA | {"tied": False}),
    "llama tied": Llama.from_flags(LLAMA | {"tied": True}),
    "gpt2": GPT2.from_flags(GPT | {"tied": False}),
    "gpt2 tied": GPT2.from_flags(GPT | {"tied": True}),
    "qwen2": Qwen2.from_flags(LLAMA | {"tied": True}),
    "qwen3": replace(Qwen3.from_flags(LLAMA | {"layers": 1}), key_length=14, value_length=14),
}
SIZES = {"vocab_size": 61, "context_length": 11, "embedding_length": 30, "feed_forward_length": 97}
SIZES |= {"head_count": 3, "head_count_kv": 1, "key_length": 10, "value_length": 10}
# further architectures, which tests run with fewer settings than MODELS
OTHERS = {arch: architectures.build(arch, SIZES) for arch in architectures.ROWS if arch not in MODELS}
OTHERS["llama, partial"] = replace(MODELS["llama"], rope_dimension_count=4)
OTHERS["phi3, partial"] = replace(OTHERS["phi3"], rope_dimension_count=6)
ADAPTED = {
    "llama, head": replace(MODELS["llama"], lora=LoRA(3, 6.0, ("output.weight", "blk.0.attn_q.weight"))),
    "llama": replace(MODELS["llama"], lora=LoRA(3, 6.0)),
    "gpt2 tied": replace(MODELS["gpt2 tied"], lora=LoRA(2, 1.0, ("blk.*.attn_qkv.weight", "blk.1.ffn*"))),
}


def micro_batch(step, number, config, rows=2):
    tokens = np.random.default_rng([step, number]).integers(
        0, config.vocab_size, (rows, config.context_length + 1)
    )
    return tokens[:, :-1], tokens[:, 1:]


def make(comm, config, strategy=FULL_SHARD, *, recompute=False, seed=0, **options):
    module = ShardedModule(config.stages(recompute), comm, strategy, **options)
    module.initialize(seed)
    return module


def run_step(module, accumulator, config, step, micro_batches):
    tokens = (2 * micro_batches - 1) * config.context_length
    for number in accumulator:
        if number is None:
            accumulator.accumulate(None)
            continue
        rows = 1 if number == micro_batches - 1 else 2
        x, targets = micro_batch(step, number, config, rows)
        accumulator.accumulate(x, partial(cross_entropy, targets=targets, scale=1 / tokens))


def train(comm, config, strategy=FULL_SHARD, *, steps=3, micro_batches=5, update=None, **options):
    """Return losses and norms of a short run, and its final parameters' sha256. `update`: AdamW's options."""
    module = make(comm, config, strategy, **options)
    optimizer = ShardedAdamW(module, lr=1e-2, **update or {})
    accumulator = GradAccum(module, micro_batches)
    records = []
    for step in range(steps):
        run_step(module, accumulator, config, step, micro_batches)
        records.append((accumulator.total_loss(), optimizer.step(max_norm=1.0).grad_norm))
    return records, digest(module.state_dict())


def trained(config, steps, seed=0):
    optimizer = ShardedAdamW(make(SerialComm(), config, seed=seed), lr=1e-2)
    accumulator = GradAccum(optimizer.module, 2)
    for step in range(steps):
        run_step(optimizer.module, accumulator, config, step, 2)
        optimizer.step(max_norm=1.0)
    return optimizer


def digest(state):
    total = hashlib.sha256()
    for name, array in state.items():
        total.update(name.encode() + device.in_use().to_host(array).tobytes())
    return total.hexdigest()


def offloaded_bytes(optimizer):
    """Return (host, device): bytes of offloaded states in pinned memory, and of their GPU buffers."""
    if optimizer._offload is None:
        return 0, 0
    host = sum(state.nbytes for states in optimizer.states.values() for state in states.values())
    return host, sum(array.nbytes for buffer in optimizer._offload.buffers for array in buffer.arrays)
