"""Our training step beside PyTorch's, run by run in turn: medians and ratios.

    python benchmarks/peers.py --workload W1 W3 --rounds 5 --torch-python PYTHON

Every run is a job of its own; a round runs each variant once, in another order each time, so that what else
the machine does hits all of them. PYTHON is an interpreter with torch 2.13.0 (CPU); ours is the one that runs
this. Ratios are tokens a second, ours over theirs.
"""

import argparse
import os
import random
import statistics
import sys
from collections.abc import Sequence

from step_jobs import HERE, run_once, step_command
from workloads import WORKLOADS

Variant = tuple[str, ...]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Time training steps beside PyTorch's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps a run")
    parser.add_argument("--torch-python", default=sys.executable, help="python with torch")
    parser.add_argument("--peers", nargs="+", help="only these, such as fsdp2 ddp one-all-cores")
    return parser


def ours(workload: str, strategy: str, options: argparse.Namespace) -> list[str]:
    """The command of one of our runs."""
    flags = ["--workload", workload, "--strategy", strategy, "--steps", str(options.steps)]
    return step_command(options.ranks, flags)


def theirs(workload: str, mode: str, ranks: int, threads: int, options: argparse.Namespace) -> list[str]:
    """The command of one of torch's runs."""
    flags = ["--workload", workload, "--mode", mode, "--ranks", str(ranks), "--threads", str(threads)]
    return [options.torch_python, str(HERE / "torch_step.py"), *flags, "--steps", str(options.steps)]


def variants(workload: str, options: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> command."""
    cores, ranks = len(os.sched_getaffinity(0)), options.ranks
    peers = {
        name: theirs(workload, name, ranks, 1, options) for name in ("fsdp2", "fsdp2-keep", "ddp", "zero")
    }
    peers["one-core"] = theirs(workload, "eager", 1, 1, options)
    peers["one-all-cores"] = theirs(workload, "eager", 1, cores, options)
    peers["compile-all-cores"] = theirs(workload, "compile", 1, cores, options)
    chosen = {name: command for name, command in peers.items() if not options.peers or name in options.peers}
    own = {f"ours {strategy}": ours(workload, strategy, options) for strategy in ("full-shard", "no-shard")}
    return own | chosen


def measure(workload: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Every variant's runs."""
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
    """Medians, and ours over theirs."""
    rate = {name: [run["tokens_per_second"] for run in runs] for name, runs in found.items()}
    best = statistics.median(rate["ours full-shard"])
    print(
        f"{workload}, {options.ranks} ranks, {options.rounds} rounds; ratio: ours full-shard over the line's"
    )
    print(f"{'variant':18} {'tokens/s':>9} {'min':>8} {'max':>8} {'ms':>9} {'RSS MB':>7} {'ratio':>6}")
    for name, values in rate.items():
        median, runs = statistics.median(values), found[name]
        ms, memory = (statistics.median(run[key] for run in runs) for key in ("ms", "rss_mb"))
        print(
            f"{name:18} {median:9.0f} {min(values):8.0f} {max(values):8.0f} {ms:9.1f} {memory:7.0f} "
            f"{best / median:6.2f}",
            flush=True,
        )


def main(arguments: Sequence[str]) -> None:
    """One table a workload."""
    options = make_parser().parse_args(arguments)
    for workload in options.workload:
        print_table(workload, measure(workload, options), options)


if __name__ == "__main__":
    main(sys.argv[1:])
