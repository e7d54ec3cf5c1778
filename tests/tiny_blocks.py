"""Tiny base model in quantized blocks of every type, and training of adapters on its blocks or floats."""

from dataclasses import replace

import numpy as np
import tiny
from gguf import GGMLQuantizationType, dequantize

from zero_mpi import FULL_SHARD, GradAccum, ShardedAdamW, ShardedModule
from zero_mpi.models import Llama
from zero_mpi.models.lora import FROZEN, LoRA
from zero_mpi.nn.linear import is_adapter
from zero_mpi.ops.block_kinds import BLOCK_KINDS, PACKED, PLAIN

SCALES = {  # block type -> positions of the float16 values in a block
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
EXPERTS = {"experts": 5, "experts_used": 2, "expert_ffn": 256}
SIZES = {"layers": 2, "dim": 256, "heads": 4, "kv_heads": 2, "ffn": 256, "context": 11, "vocab_size": 61}


def some_blocks(name, count, seed=0):
    """Return bytes of blocks with small scales and otherwise random bits."""
    kind, generator = BLOCK_KINDS[name], np.random.default_rng([seed, count])
    if name in PLAIN:
        return (0.05 * generator.standard_normal(count) + 1).astype(PLAIN[name]).view(np.uint8)
    blocks = generator.integers(256, size=(count, kind.nbytes), dtype=np.uint8)
    for at in SCALES[name]:
        scales = generator.uniform(-2e-3, 2e-3, (count, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(-1)


def base(tied, **extra):
    """Return a model with adapters, and the bytes of its base by name, in blocks of many types."""
    model = Llama.from_flags(SIZES | {"tied": tied} | extra)
    kinds = {}
    for number, (name, param) in enumerate(model.params().items()):
        of_norm = len(param.shape) == 1
        kind = "F32" if of_norm else [*PACKED, "F16", "BF16"][number % 12]
        kinds[name] = BLOCK_KINDS[kind]
    model = replace(model, lora=LoRA(3, 6.0, stored=tuple(kinds.items())))
    return model, bytes_of(model)


def bytes_of(model):
    """Return the bytes of all stored tensors of a model, the same in every call."""
    sizes = {name: model.params()[name].size for name in model.stored}
    return {
        name: some_blocks(kind.name, sizes[name] // kind.elements, number)
        for number, (name, kind) in enumerate(model.stored.items())
    }


def make(comm, model, raw, strategy=FULL_SHARD, *, stored=True, **options):
    """Return a module with the base in blocks, or in floats if not `stored`; adapters start at random."""
    kinds = model.stored if stored else {}
    options = {"frozen": FROZEN, **options}
    module = ShardedModule(model.stages(), comm, strategy, stored=kinds, **options)
    module.initialize(1, [name for name in module.params if is_adapter(name)])

    def of_floats(name, start, stop):
        kind = GGMLQuantizationType[model.stored[name].name]
        return dequantize(raw[name], kind).astype(np.float32)[start:stop]

    def of_bytes(name, start, out):
        out[...] = raw[name][start : start + out.size]

    module.load_slices(of_floats, [] if stored else raw)
    module.load_stored(of_bytes)
    return module


def train(comm, model, raw, strategy=FULL_SHARD, *, steps=2, micro_batches=5, **options):
    """Return losses and norms of a short run, and the sha256 of all parameters after it."""
    module = make(comm, model, raw, strategy, **options)
    optimizer, accumulator = ShardedAdamW(module, lr=1e-2), GradAccum(module, micro_batches)
    records = []
    for step in range(steps):
        tiny.run_step(module, accumulator, model, step, micro_batches)
        records.append((accumulator.total_loss(), optimizer.step(max_norm=1.0).grad_norm))
    adapters = {name: module.all_gather_param(name) for name in module.params}
    return records, tiny.digest(adapters)
