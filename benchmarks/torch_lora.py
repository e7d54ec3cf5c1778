"""Fine-tuning step of PEFT, to compare with ours: SmolLM2-135M with LoRA, random weights, one process or DDP.

    python benchmarks/torch_lora.py --ranks 2 --precision autocast

`finetune.py` starts it. `autocast` casts inputs of matmuls to bfloat16; `bf16` also keeps weights and
adapters in bfloat16. It needs torch 2.13.0, transformers and peft, on which zero_mpi does not depend.
"""

import argparse
import json
import os
import resource
import statistics
import time
from typing import Any

from torch_step import free_port

WARMUP = 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Time fine-tuning steps of PEFT.")
    parser.add_argument("--precision", choices=("fp32", "autocast", "bf16"), default="fp32")
    parser.add_argument("--recompute", action="store_true")
    for name, default in (("ranks", 1), ("threads", 1), ("batch", 4), ("context", 256), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def make_model(options: argparse.Namespace) -> Any:
    """Return SmolLM2-135M with adapters of rank 8 on all of its projections."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    config = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
    low = options.precision == "bf16"
    model = LlamaForCausalLM(config).to(torch.bfloat16 if low else torch.float32)
    if options.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=not low).train()


def measure(rank: int, options: argparse.Namespace) -> None:
    """Train on this rank. Rank 0 prints the result."""
    import torch
    from torch import distributed

    torch.set_num_threads(options.threads)
    model = make_model(options)
    trained = [each for each in model.parameters() if each.requires_grad]
    if options.ranks > 1:
        distributed.init_process_group("gloo", rank=rank, world_size=options.ranks)
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    generator, times = torch.Generator().manual_seed(rank), []
    for _ in range(WARMUP + options.steps):
        ids = torch.randint(49152, (options.batch, options.context), generator=generator)
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "autocast"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - begun)
    if rank == 0:
        tokens = options.ranks * options.batch * options.context
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        found = {"tokens_per_second": tokens / statistics.median(times[WARMUP:]), "rss_mb": memory}
        print(json.dumps(found), flush=True)


def main() -> None:
    """Start the ranks and wait for them."""
    options = make_parser().parse_args()
    os.environ |= {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if options.ranks == 1:
        measure(0, options)
        return
    import torch.multiprocessing

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(options.ranks)}
    os.environ["MASTER_PORT"] = str(free_port())
    torch.multiprocessing.spawn(measure, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
