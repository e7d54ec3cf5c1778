"""Measures how much a quantized type raises the loss after fine-tuning, with and without --qat.

    python benchmarks/qat.py MODEL.gguf

Two ranks fine-tune the model twice on Python's help texts, with and without --qat. Both results are exported
to the type. The held-out loss is measured for the exported files, and for the result without --qat before it
is quantized. The last line shows which share of the loss increase from quantization --qat avoids.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = (
        "Measure how much a quantized type raises the loss after fine-tuning, and how much --qat lowers it."
    )
    parser = argparse.ArgumentParser(prog="python benchmarks/qat.py", description=about)
    parser.add_argument("model", type=Path, help="GGUF file to fine-tune")
    parser.add_argument("--type", default="q4_0", help="type of the exported files (default: q4_0)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--ranks", type=int, default=2, help="MPI ranks (default: 2)")
    parser.add_argument("--lr", default="1e-4", help="peak learning rate (default: 1e-4)")
    return parser


def main() -> None:
    """Train, export and evaluate. Print the table."""
    options = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, names = Path(made), sorted(topics)
        (folder / "held.txt").write_text("\n\n".join(topics[name] for name in names[::10]))
        rest = (topics[name] for place, name in enumerate(names) if place % 10)
        (folder / "train.txt").write_text("\n\n".join(rest))

        def run(*arguments: object, ranks: int = 0) -> None:
            start = ["mpirun", "-n", str(ranks), sys.executable] if ranks else [sys.executable]
            subprocess.run([*start, "-m", *map(str, arguments)], cwd=folder, check=True, stdout=sys.stderr)

        def loss(model: str) -> float:
            flags = ("--data", "held.txt", "--context", 128, "--micro-batch", 4, "--precision", "bf16")
            run("zero_mpi", "evaluate", model, *flags, "--json", "found.json", ranks=options.ranks)
            return float(json.loads((folder / "found.json").read_text())["models"][0]["text"]["loss"])

        size = ("--context", 128, "--batch-size", 8, "--micro-batch", 4, "--precision", "bf16")
        train = ("--init", options.model.resolve(), "--data", "train.txt", *size, "--steps", options.steps)
        rest_of = ("--lr", options.lr, "--sample", 0, "--eval-every", 0, "--save-every", 0)
        for out, more in (("plain", ()), ("qat", ("--qat", options.type))):
            run("zero_mpi.train", *train, *rest_of, "--out", out, *more, ranks=options.ranks)
            run("zero_mpi", "export", f"{out}/latest", f"{out}.gguf", "--type", options.type)
        floats, plain, qat = (loss(name) for name in ("plain/latest", "plain.gguf", "qat.gguf"))
    print(f"fine-tuned, floats       {floats:.4f} nats per token")
    print(f"fine-tuned, then {options.type:8} {plain:.4f}")
    print(f"--qat {options.type:8}, exported {qat:.4f}")
    print(f"loss avoided by --qat    {100 * (plain - qat) / (plain - floats):.0f} %")


if __name__ == "__main__":
    main()
