"""Times the evaluation of a model on a text, compared with transformers on the same cores.

    python benchmarks/evaluate.py MODEL.gguf --torch-python PYTHON

Both programs take turns and compute the losses of the same number of windows of random tokens: ours is the
command `zero-mpi evaluate` with one rank per core; transformers is one process on all cores. Ours runs on few
and on many windows; its rate is the difference in tokens divided by that in time, so the startup time does
not count. `ratio` is the ratio of medians, above 1 if ours is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from step_jobs import HERE, launcher, run_once

FEW, WARMUP = 4, 1  # windows of the shorter run; batches that only warm up
CORES = len(os.sched_getaffinity(0))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/evaluate.py",
        description="Time evaluation and compare it with transformers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=24, help="windows of the longer run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch", action="store_true", help="time transformers in this process")
    return parser


def ours(options: argparse.Namespace, precision: str) -> float:
    """Evaluate few and many windows with our command. Return tokens per second from the difference."""
    import numpy as np

    took = []
    with tempfile.TemporaryDirectory() as folder:
        count = options.windows * options.context + 1
        ids = np.random.default_rng(0).integers(1000, 30000, size=count)
        np.save(f"{folder}/tokens.npy", ids.astype(np.uint16))
        for windows in (FEW, options.windows):
            command = [
                launcher(),
                "-n",
                str(CORES),
                sys.executable,
                "-m",
                "zero_mpi",
                "evaluate",
                options.model,
            ]
            flags = f"--data {folder}/tokens.npy --context {options.context} --windows {windows} --threads 1"
            begun = time.perf_counter()
            subprocess.run(
                [*command, *flags.split(), "--precision", precision], check=True, capture_output=True
            )
            took.append(time.perf_counter() - begun)
    return float((options.windows - FEW) * options.context / (took[1] - took[0]))


def theirs(options: argparse.Namespace, precision: str) -> float:
    """Run transformers in a process of its own. Return tokens per second."""
    command = [options.torch_python, str(HERE / "evaluate.py"), os.path.abspath(options.model), "--torch"]
    flags = f"--precision {precision} --context {options.context} --windows {options.windows}"
    found = run_once([*command, *flags.split()])
    if found is None:
        raise SystemExit("transformers failed: see the message above")
    return found["tokens_per_second"]


def time_transformers(options: argparse.Namespace) -> None:
    """Compute the loss of one window after the other, and print the rate."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(CORES)
    folder, file = os.path.split(os.path.abspath(options.model))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision[0]]
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype).eval()
    generator, times = torch.Generator().manual_seed(0), []
    with torch.inference_mode():
        for _ in range(WARMUP + options.windows):
            ids = torch.randint(1000, 30000, (1, options.context), generator=generator)
            begun = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.item()
            times.append(time.perf_counter() - begun)
    rate = options.context / statistics.median(times[WARMUP:])
    print(json.dumps({"tokens_per_second": rate}), flush=True)


def main() -> None:
    """Print the tokens per second of both programs, and the ratio, for each precision."""
    options = make_parser().parse_args()
    if options.torch:
        time_transformers(options)
        return
    for precision in options.precision:
        rates: dict[str, list[float]] = {"zero_mpi": [], "transformers": []}
        for _ in range(options.rounds):
            rates["zero_mpi"].append(ours(options, precision))
            rates["transformers"].append(theirs(options, precision))
        first, second = (statistics.median(each) for each in rates.values())
        print(f"{precision}  zero_mpi {first:.1f}  transformers {second:.1f}  ratio {first / second:.2f}")


if __name__ == "__main__":
    main()
