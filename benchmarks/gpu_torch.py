"""Times PyTorch's training step on one GPU, for comparison with ours. It is used like `gpu_train.py steps`.

    echo 20 | python benchmarks/gpu_torch.py --workload gpt2-124m --mode compile

PyTorch runs in its usual fast way. "compile": torch.compile, fused attention (SDPA), fused AdamW, and float32
parameters under autocast to bf16. "eager": the same without torch.compile. "fsdp2": FSDP2 on one GPU with
bf16 parameters and compiled blocks, as in torchtitan. The vocabulary is rounded up to a multiple of 128.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch_models import Model
from workloads import ALL, BATCHES, BETAS, CLIP, DECAY, EPS, LR, Workload

MODES = ("compile", "eager", "fsdp2")
WARM_UP = 6  # number of steps that are not timed; they include compilation
ROUNDED_TO = 128


class GroupedAttention(nn.Module):
    """Causal attention with fewer key/value heads than query heads, and rotary positions on split halves."""

    def __init__(self, size: Workload) -> None:
        super().__init__()
        self.heads, self.kv = size.heads, size.kv_heads or size.heads
        self.head = size.width // size.heads
        self.qkv = nn.Linear(size.width, (self.heads + 2 * self.kv) * self.head, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        frequencies = 500000.0 ** (-torch.arange(0, self.head, 2) / self.head)
        angles = torch.outer(torch.arange(size.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x: Any) -> Any:
        """Return x after rotating it by its positions."""
        a, b = x.chunk(2, dim=-1)
        turned = torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)
        return turned.to(x.dtype)

    def forward(self, x: Any) -> Any:
        """Return attention of x (B, T, C)."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv, self.kv], dim=1)
        y = functional.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=self.kv != self.heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def make_model(size: Workload) -> nn.Module:
    """Return the workload's model with float32 weights on the GPU."""
    rounded = replace(size, vocabulary=-(-size.vocabulary // ROUNDED_TO) * ROUNDED_TO)
    with torch.device("cuda"):
        model = Model(rounded)
        if size.arch == "llama":
            for block in model.blocks:
                block.attention = GroupedAttention(size)
                for parameter in block.attention.parameters():
                    nn.init.normal_(parameter, std=0.02)
        if size.tied:
            model.head.weight = model.tokens.weight
    return model


def distributed(model: nn.Module) -> nn.Module:
    """Return the model in FSDP2 over one rank, with the settings of torchtitan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


class Stepper:
    """A model in training, with its optimizer."""

    def __init__(self, size: Workload, mode: str) -> None:
        torch.manual_seed(0)
        self.size, self.autocasts = size, mode != "fsdp2"
        model = make_model(size)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model = distributed(model) if mode == "fsdp2" else model
        settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "fused": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        self.loss_of: Callable[[Any], Any] = (
            torch.compile(self.forward) if mode == "compile" else self.forward
        )
        shape = (BATCHES, size.batch, size.context + 1)
        self.data = torch.randint(size.vocabulary, shape, device="cuda")
        self.done, self.loss = 0, torch.zeros(())

    def forward(self, ids: Any) -> Any:
        """Return the loss of a micro-batch."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocasts):
            logits = self.model(ids[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].reshape(-1))

    def step(self) -> None:
        """Run one step, but do not wait for the GPU."""
        loss = self.loss_of(self.data[self.done % BATCHES])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        self.done += 1

    def timed(self, count: int) -> list[float]:
        """Run `count` steps. Return the milliseconds of each step, measured by GPU events."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [first.elapsed_time(second) for first, second in pairwise(events)]


def say(**found: Any) -> None:
    """Print the arguments as a line of JSON."""
    print(json.dumps(found), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Answer each number on stdin with the times of that number of steps, until stdin ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=tuple(ALL), default="gpt2-124m")
    parser.add_argument("--batch", type=int, help="sequences per micro-batch (default: the workload's)")
    parser.add_argument("--mode", choices=MODES, default="compile")
    options = parser.parse_args(arguments)
    size = ALL[options.workload]
    size = replace(size, batch=options.batch or size.batch)
    torch.set_float32_matmul_precision("high")
    stepper = Stepper(size, options.mode)
    for _ in range(WARM_UP):
        stepper.step()
    torch.cuda.synchronize()
    say(ready=True, parameters=stepper.parameters, tokens=size.tokens, loss=float(stepper.loss))
    for line in sys.stdin:
        if line.strip():
            say(ms=stepper.timed(int(line)))
    free, total = torch.cuda.mem_get_info()
    say(
        loss=float(stepper.loss),
        pool_mb=torch.cuda.max_memory_reserved() / 2**20,
        allocated_mb=torch.cuda.max_memory_allocated() / 2**20,
        gpu_used_mb=(total - free) / 2**20,
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
