"""Times steps of a mixture of experts, of a dense model of equal active size, and of transformers with DDP.

    mpirun -n 2 python benchmarks/moe.py
    mpirun -n 2 python benchmarks/moe.py --dense
    TORCH-PYTHON -m torch.distributed.run --nproc-per-node 2 benchmarks/moe.py --torch

The model is Qwen3 with 8 blocks of width 512 and 32 experts of width 256, of which a token uses 4 (dense:
width 1024). Each rank trains on 4 sequences of 256 random tokens. Prints the median tokens per second. Run
the three commands in turns. `--make FILE` writes a mixture with random weights in BF16; export it as Q4_0 to
measure memory.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

LAYERS, WIDTH, HEADS, EXPERTS, USED, HIDDEN = 8, 512, 8, 32, 4, 256
VOCABULARY, BATCH, CONTEXT = 512, 4, 256
SIZES = {"layers": LAYERS, "dim": WIDTH, "heads": HEADS, "context": CONTEXT, "vocab_size": VOCABULARY}
MIXTURE = {"experts": EXPERTS, "experts_used": USED, "expert_ffn": HIDDEN}
LARGE = {"layers": 24, "dim": 1024, "heads": 16, "context": 512, "vocab_size": 256, "tied": True}
LARGE |= {"experts": 48, "experts_used": 4, "expert_ffn": 768}


def tokens(step: int, rank: int) -> np.ndarray:
    """Return random tokens (B, T + 1) for a step."""
    return np.random.default_rng([step, rank]).integers(VOCABULARY, size=(BATCH, CONTEXT + 1))


def ours(dense: bool, precision: str) -> tuple[int, int, Callable[[int], object]]:
    """Return rank, number of ranks, and a function that runs one training step with zero_mpi."""
    from zero_mpi import GradAccum, ShardedAdamW, ShardedModule, connect, ops
    from zero_mpi.models import ARCHITECTURES
    from zero_mpi.nn import CrossEntropy
    from zero_mpi.sharding.precision import precision_named

    kind = precision_named(precision)
    ops.prepare(print, kind.compute)
    comm, sizes = connect(), SIZES | ({"ffn": USED * HIDDEN} if dense else MIXTURE)
    stages = ARCHITECTURES["qwen3" if dense else "qwen3moe"].from_flags(sizes).stages()
    auxiliary = None if dense else {"balance_loss": 0.001}
    module = ShardedModule(stages, comm, precision=kind, auxiliary=auxiliary)
    module.initialize(0)
    optimizer, accumulator = ShardedAdamW(module), GradAccum(module, comm.size)
    scale = 1 / (comm.size * BATCH * CONTEXT)

    def step(number: int) -> None:
        for _ in accumulator:
            drawn = tokens(number, comm.rank)
            accumulator.accumulate(drawn[:, :-1], CrossEntropy(drawn[:, 1:], scale))
        accumulator.total_loss()
        optimizer.step(max_norm=1.0)

    return comm.rank, comm.size, step


def theirs(precision: str) -> tuple[int, int, Callable[[int], object]]:
    """Return rank, number of ranks, and a function that runs one training step with transformers."""
    import torch
    from torch import distributed
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH // HEADS,
        moe_intermediate_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        norm_topk_prob=True,
        output_router_logits=True,
    )
    model = torch.nn.parallel.DistributedDataParallel(Qwen3MoeForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rank, low = distributed.get_rank(), precision == "bf16"

    def step(number: int) -> None:
        ids = torch.from_numpy(tokens(number, rank)[:, :-1].copy())
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return rank, distributed.get_world_size(), step


def make(path: str) -> None:
    """Write a mixture with random weights in BF16."""
    import ml_dtypes
    from gguf import GGMLQuantizationType, GGUFWriter

    from zero_mpi.models import ARCHITECTURES

    model = ARCHITECTURES["qwen3moe"].from_flags(LARGE)
    writer, random = GGUFWriter(path, model.arch), np.random.default_rng(0)
    for key, value in model.metadata().items():
        if key != "general.architecture":
            add = writer.add_float32 if isinstance(value, np.floating) else writer.add_uint32
            add(key, value.item() if hasattr(value, "item") else value)
    kinds = {2: (ml_dtypes.bfloat16, GGMLQuantizationType.BF16), 1: (np.float32, GGMLQuantizationType.F32)}
    for name, param in model.params().items():
        kind = kinds[min(2, len(param.shape))] if "gate_inp" not in name else kinds[1]
        writer.add_tensor_info(name, param.shape, kind[0], param.size * np.dtype(kind[0]).itemsize, kind[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, param in model.params().items():
        values = random.standard_normal(param.shape, np.float32) * param.std if len(param.shape) > 1 else 1
        kind = np.float32 if len(param.shape) < 2 or "gate_inp" in name else ml_dtypes.bfloat16
        writer.write_tensor_data(np.broadcast_to(values, param.shape).astype(kind).view(np.uint8))
    writer.close()


def main() -> None:
    """Time the steps that the command line selects."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--make", metavar="FILE")
    options = parser.parse_args()
    if options.make:
        make(options.make)
        return
    made = theirs(options.precision) if options.torch else ours(options.dense, options.precision)
    rank, ranks, step = made
    times = []
    for number in range(3 + options.steps):
        start = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - start)
    if rank == 0:
        rate = ranks * BATCH * CONTEXT / statistics.median(times[3:])
        name = "transformers" if options.torch else "dense" if options.dense else "mixture"
        print(f"{name} {options.precision}: {rate:.0f} tokens/s, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
