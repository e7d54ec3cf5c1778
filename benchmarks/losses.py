"""Compares the losses of training in bfloat16 with those in float32, step by step on real text.

    python benchmarks/losses.py --workload W3 W1 --steps 200 --ranks 2
    python benchmarks/losses.py --init MODEL.gguf --steps 40 -- --context 128 --batch-size 4

The two jobs of zero_mpi.train differ only in --precision. Without --data after the --, the text is the
default text, but a workload with another vocabulary than 256 reads Python's library. A comparison prints the
largest difference between the two losses of a step, and both final validation losses.
"""

import argparse
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from step_jobs import launcher
from workloads import LR, WORKLOADS

PRECISIONS = ("fp32", "bf16")
BYTES = 256


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=[])
    what.add_argument("--init", help="GGUF model to train further, instead of the workloads")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("flags", nargs="*", help="flags of zero_mpi.train, after --")
    return parser


def workload_flags(name: str, ranks: int, folder: str) -> list[str]:
    """Return the flags of zero_mpi.train for a workload. With vocabulary 256, tokens are bytes."""
    size = WORKLOADS[name]
    named = {"arch": size.arch, "batch-size": size.batch * ranks, "micro-batch": size.batch, **size.flags}
    named["lr"] = LR
    if size.vocabulary == BYTES:
        del named["vocab_size"]
    else:
        named["data"] = write_words(Path(folder, "words.npy"), size.vocabulary)
    return [text for flag, value in named.items() for text in (f"--{flag.replace('_', '-')}", str(value))]


def write_words(path: Path, vocabulary: int) -> Path:
    """Write a token file of the words in Python's library. All rare words share one token."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = re.findall(r"\w+|\s+|.", "".join(source.read_text(errors="replace") for source in sources))
    ids = {word: min(place, vocabulary - 1) for place, (word, _) in enumerate(Counter(words).most_common())}
    np.save(path, np.array([ids[word] for word in words], np.uint16))
    return path


def train(flags: Sequence[str], ranks: int, out: Path) -> list[dict[str, float]]:
    """Run a training. Return the records in its metrics file."""
    command = [launcher(), "-n", str(ranks), sys.executable, "-m", "zero_mpi.train", "--out", str(out)]
    command += ["--sample", "0", "--save-every", "0", "--keep", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"losses: {done.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def compare(name: str, flags: Sequence[str], ranks: int, folder: str) -> None:
    """Train in both precisions, and print how far apart the losses are."""
    outs = [(kind, Path(folder, f"{name}-{kind}")) for kind in PRECISIONS]
    runs = [train([*flags, "--precision", kind], ranks, out) for kind, out in outs]
    wide, low = ([line for line in run if "loss" in line] for run in runs)
    apart, step = max((abs(a["loss"] - b["loss"]), a["step"]) for a, b in zip(wide, low, strict=True))
    last = [[line["val_loss"] for line in run if line.get("val_loss") is not None][-1] for run in runs]
    losses = (
        f"losses {wide[0]['loss']:.4f} to {wide[-1]['loss']:.4f}, at most {apart:.4f} apart (step {step})"
    )
    held_out = f"validation {last[0]:.4f} fp32, {last[1]:.4f} bf16, {100 * (last[1] / last[0] - 1):+.3f} %"
    print(f"{name}: {len(wide)} steps, {losses}; {held_out}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Run one comparison for each workload, or one for the model of --init."""
    options = make_parser().parse_args(arguments)
    steps = ["--steps", str(options.steps), *options.flags]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workload:
            flags = workload_flags(name, options.ranks, folder)
            compare(name, [*flags, *steps], options.ranks, folder)
        if options.init:
            compare(Path(options.init).name, ["--init", options.init, *steps], options.ranks, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
