"""Training step of PyTorch, to compare with ours: one process, DDP, FSDP2 or ZeroRedundancyOptimizer (gloo).

    python benchmarks/torch_step.py --workload W1 --mode fsdp2 --ranks 2 --precision bf16

bf16 is torch.autocast; in mode fsdp2-low it is FSDP2's own policy: gather parameters in bfloat16, reduce
gradients in float32. zero_mpi does not depend on torch: pip install torch==2.13.0 to run this.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from workloads import BATCHES, BETAS, CLIP, DECAY, EPS, LR, WORKLOADS, Workload

MODES = ("eager", "compile", "ddp", "fsdp2", "fsdp2-keep", "fsdp2-low", "zero")
PRECISIONS = ("fp32", "bf16")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Time training steps of PyTorch.")
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="W1")
    parser.add_argument("--mode", choices=MODES, default="eager")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per rank")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    return parser


def distribute(model: Any, mode: str) -> Any:
    """Return the model, wrapped for the mode."""
    import torch

    if mode == "compile":
        return torch.compile(model)
    if mode in ("ddp", "zero"):
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if mode.startswith("fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        settings = {"mesh": mesh, "reshard_after_forward": mode != "fsdp2-keep"}
        if mode == "fsdp2-low":
            settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.blocks:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
    return model


def make_optimizer(model: Any, mode: str) -> Any:
    """Return fused AdamW; in mode zero its state is sharded."""
    import torch

    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "fused": True}
    if mode != "zero":
        return torch.optim.AdamW(model.parameters(), **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)


def measure(rank: int, options: argparse.Namespace) -> None:
    """Run one rank. Rank 0 prints the result."""
    import torch
    from torch import distributed
    from torch.nn import functional as F

    torch.set_num_threads(options.threads)
    many = options.ranks > 1 or options.mode not in ("eager", "compile")
    if many:
        distributed.init_process_group("gloo", rank=rank, world_size=options.ranks)
    from torch_models import Model

    size = WORKLOADS[options.workload]
    torch.manual_seed(0)
    model = distribute(Model(size), options.mode)
    optimizer = make_optimizer(model, options.mode)
    generator = torch.Generator().manual_seed(rank)
    shape = (BATCHES, size.batch, size.context + 1)
    data = torch.randint(size.vocabulary, shape, generator=generator)
    casts = options.precision == "bf16" and options.mode != "fsdp2-low"
    times = []
    for number in range(options.warmup + options.steps):
        if many:
            distributed.barrier()
        begun = time.perf_counter()
        ids = data[number % BATCHES]
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, size.vocabulary), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - begun)
    report(options, size, times[options.warmup :], many)


def report(options: argparse.Namespace, size: Workload, times: list[float], many: bool) -> None:
    """Print the median over steps of the slowest rank's time, and the largest memory of a rank."""
    from torch import distributed

    own = (times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    found: list[Any] = [own]
    if many:
        found = [None] * options.ranks
        distributed.all_gather_object(found, own)
    if not many or distributed.get_rank() == 0:
        median = statistics.median(
            max(together) for together in zip(*(times for times, _ in found), strict=True)
        )
        line = {
            "workload": options.workload,
            "mode": options.mode,
            "precision": options.precision,
            "ranks": options.ranks,
            "ms": 1e3 * median,
        }
        line |= {"tokens_per_second": options.ranks * size.tokens / median}
        print(json.dumps(line | {"rss_mb": max(memory for _, memory in found)}), flush=True)
    if many:
        distributed.destroy_process_group()


def free_port() -> int:
    """Return a free port on the loopback device, over which the ranks connect."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str]) -> None:
    """Start the ranks and wait for them."""
    options = make_parser().parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(options.ranks)}
    os.environ["MASTER_PORT"] = str(free_port())
    if options.ranks == 1:
        measure(0, options)
        return
    from torch import multiprocessing

    multiprocessing.spawn(measure, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
