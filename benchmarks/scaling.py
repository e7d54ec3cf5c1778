"""Measures how time, traffic and memory of training steps grow with ranks, context, vocabulary and depth.

    python benchmarks/scaling.py [--sweep ranks context vocabulary layers] [--steps 3]

Every line is a job of `step.py`. A sweep changes one size of a workload. Ranks: the batch is per rank, so on
the same cores twice the ranks take twice the time; the total memory of all ranks shows which arrays exist
once. Context: the tokens of a step stay the same, so a column that grows shows a cost of the context.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from step_jobs import run_once, step_command


@dataclass(frozen=True)
class Line:
    """A job: its number of ranks, and its flags for step.py."""

    ranks: int
    flags: tuple[str, ...]


def line(ranks: int, **flags: int | str) -> Line:
    """Return a job with these flags for step.py."""
    return Line(ranks, tuple(text for name, value in flags.items() for text in (f"--{name}", str(value))))


SWEEPS = {
    "ranks": [line(ranks, workload=w) for w in ("W3", "W1") for ranks in (1, 2, 4, 8)],
    "context": [
        line(2, workload="W1", layers=2, context=t, batch=8192 // t) for t in (256, 512, 1024, 2048, 4096)
    ],
    "vocabulary": [
        line(2, workload="W3", vocabulary=v, context=128, batch=8) for v in (256, 4096, 32768, 131072)
    ],
    "layers": [line(2, workload="W3", layers=layers) for layers in (4, 12, 24, 48)],
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Time training steps while one size grows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--sweep", nargs="+", choices=tuple(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps in a job")
    parser.add_argument("--most", type=int, help="maximum number of lines per sweep")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run each sweep and print its table."""
    options = make_parser().parse_args(arguments)
    for name in options.sweep:
        columns = ("ms", "tokens/s", "wait ms", "sent MB", "RSS MB", "PSS of all", "activations")
        print(f"{name + ', full-shard':44} {'ranks':>5} " + " ".join(f"{column:>11}" for column in columns))
        for chosen in SWEEPS[name][: options.most]:
            flags = [*chosen.flags, "--steps", str(options.steps)]
            found = run_once(step_command(chosen.ranks, flags))
            if found is None:
                raise SystemExit(1)
            keys = (
                "ms",
                "tokens_per_second",
                "wait_ms",
                "sent_mb",
                "rss_mb",
                "pss_of_all_mb",
                "activations_mb",
            )
            print(
                f"{' '.join(chosen.flags):44} {chosen.ranks:5} "
                + " ".join(f"{found[key]:11.1f}" for key in keys),
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
