"""Compares our training step with PyTorch's in alternating runs: prints medians and ratios.

    python benchmarks/peers.py --workload W1 W3 --rounds 5 --torch-python PYTHON

Every run is a separate job. A round runs each variant once, in another order each time, so that other load on
the machine affects all of them. Variants use float32 unless their name ends in bf16. torch's bf16 is
autocast, but `fsdp2-low` uses FSDP2's mixed-precision policy. The first line names the matrix units of the
processor. PYTHON is an interpreter with torch 2.13.0 (CPU); this interpreter runs ours. A ratio is our tokens
per second divided by theirs.
"""

import argparse
import os
import random
import statistics
import sys
from collections.abc import Sequence

from step_jobs import HERE, run_once, step_command
from workloads import WORKLOADS

from zero_mpi.environment import of_processor
from zero_mpi.train import description as same_bits

UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # names of matrix units of x86-64, the best first
BF16 = " bf16"  # end of a variant's name


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Compare our training steps with PyTorch's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps in a run")
    parser.add_argument("--torch-python", default=sys.executable, help="Python interpreter with torch")
    parser.add_argument("--peers", nargs="+", help="variants to run, such as fsdp2 'ddp bf16'; default: all")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    return parser


def ours(workload: str, strategy: str, precision: str, options: argparse.Namespace) -> list[str]:
    """Return the command for one of our runs."""
    flags = ["--workload", workload, "--strategy", strategy, "--precision", precision]
    return step_command(options.ranks, [*flags, "--steps", str(options.steps)])


def theirs(
    workload: str, mode: str, precision: str, ranks: int, threads: int, options: argparse.Namespace
) -> list[str]:
    """Return the command for one of torch's runs."""
    flags = ["--workload", workload, "--mode", mode, "--ranks", str(ranks), "--threads", str(threads)]
    flags += ["--precision", precision, "--steps", str(options.steps)]
    return [options.torch_python, str(HERE / "torch_step.py"), *flags]


def variants(workload: str, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the name and the command of each variant."""
    cores, ranks = len(os.sched_getaffinity(0)), options.ranks
    own, peers = {}, {}
    for precision in options.precision:
        end = "" if precision == "fp32" else BF16
        for strategy in ("full-shard", "no-shard"):
            own[f"ours {strategy}{end}"] = ours(workload, strategy, precision, options)
        sharded = ("fsdp2", "fsdp2-keep", "ddp", "zero") + (("fsdp2-low",) if end else ())
        modes = [(mode, mode, ranks, 1) for mode in sharded]
        modes += [("one-core", "eager", 1, 1), ("one-all-cores", "eager", 1, cores)]
        modes += [("compile-all-cores", "compile", 1, cores)]
        for name, mode, processes, threads in modes:
            peers[name + end] = theirs(workload, mode, precision, processes, threads, options)
    return own | {name: peer for name, peer in peers.items() if not options.peers or name in options.peers}


def processor() -> str:
    """Return the name of the processor, and its matrix units under Linux's names."""
    units = [unit for unit in UNITS if unit in of_processor("flags").split()]
    return f"{same_bits.processor()}: {' '.join(units) or 'no known matrix units'}"


def measure(workload: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return variant -> results of its runs."""
    commands = variants(workload, options)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    order = random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(list(commands), len(commands)):
            result = run_once(commands[name])
            if result is not None:
                found[name].append(result)
    return {name: results for name, results in found.items() if results}


def print_table(workload: str, found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    """Print medians, and the ratio of our tokens per second to the tokens per second of each line."""
    rate = {name: [run["tokens_per_second"] for run in runs] for name, runs in found.items()}
    own = {name: statistics.median(rate[name]) for name in rate if name.startswith("ours full-shard")}
    heads = " ".join(f"{name.removeprefix('ours '):>15}" for name in own)
    print(f"{workload}, {options.ranks} ranks, {options.rounds} rounds; ratio: our tokens/s / the line's")
    print(f"{'variant':22} {'tokens/s':>9} {'min':>8} {'max':>8} {'ms':>9} {'RSS MB':>7} {heads}")
    for name, values in rate.items():
        median, runs = statistics.median(values), found[name]
        ms, memory = (statistics.median(run[key] for run in runs) for key in ("ms", "rss_mb"))
        ratios = " ".join(f"{best / median:15.2f}" for best in own.values())
        spread = f"{median:9.0f} {min(values):8.0f} {max(values):8.0f}"
        print(f"{name:22} {spread} {ms:9.1f} {memory:7.0f} {ratios}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Measure each workload and print its table."""
    options = make_parser().parse_args(arguments)
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # both override what OpenBLAS detects
        os.environ.pop(name, None)
    print(processor())
    for workload in options.workload:
        print_table(workload, measure(workload, options), options)


if __name__ == "__main__":
    main(sys.argv[1:])
