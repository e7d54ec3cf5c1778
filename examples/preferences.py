"""Train SmolLM2-135M-Instruct with DPO to prefer the right documentation of a Python name.

    mpirun -n 2 python examples/preferences.py

The pairs are questions such as "What does str.split do?". The chosen answer is the first paragraph of the
documentation; the rejected answer describes another name or is half of the chosen one. A tenth of the pairs
is held out. Accuracy and margin on these pairs, before and after training, say how often and by how much the
model prefers the chosen answer more than the initial model does. Only adapters are trained. Flags of
`zero_mpi.train` may follow the command above. It takes two minutes on two cores.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune_smollm2 import conversations, find_model

from zero_mpi.config.command_line import parse
from zero_mpi.launch.stopping import PREPARING, signals
from zero_mpi.launch.world import World, run
from zero_mpi.train.command import command as train

DATA, HELD_OUT = Path("runs/pairs/train.jsonl"), Path("runs/pairs/held-out.jsonl")
FLAGS = {
    "--out": "runs/preferences",
    "--loss": "dpo",
    "--lora": "8",
    "--context": "192",
    "--batch-size": "4",
    "--micro-batch": "1",
    "--steps": "16",
    "--warmup": "2",
    "--lr": "5e-4",
    "--eval-every": "16",
    "--eval-windows": "8",
    "--sample": "0",
}
MOST = 160  # maximum number of characters of an answer


def pairs() -> list[dict[str, str]]:
    """Return a chosen and a rejected answer for each question, sorted by question."""
    known = [(question, text) for question, text in conversations().items() if len(text) <= MOST]
    found = []
    for number, (question, text) in enumerate(known):
        other = known[number * 7 % len(known)][1]
        wrong = text[: len(text) // 2] if number % 2 or other == text else other
        found.append({"prompt": question, "chosen": text, "rejected": wrong})
    return found


def write_pairs() -> None:
    """Write every tenth pair to HELD_OUT, and all others to DATA."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(each) + "\n" for each in pairs()]
    HELD_OUT.write_text("".join(lines[::10]), encoding="utf-8")
    DATA.write_text("".join(line for i, line in enumerate(lines) if i % 10), encoding="utf-8")


def tell(out: Path) -> None:
    """Print accuracy and margin before and after training."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    for name in ("accuracies", "margins"):
        key = f"val_rewards/{name}"
        print(f"{name} of held-out pairs: {first[f'{key}_before']:.3f} before, {last[key]:.3f} after")
    print(f"adapter: {out / 'latest' / 'adapter.gguf'}")


def command(world: World, arguments: Sequence[str]) -> int:
    """Train with FLAGS, which the command line may override. Return the exit status."""
    signals.enter(PREPARING)
    model = world.run_on_all(find_model)
    world.on_root(write_pairs)
    given = ["--init", str(model), "--data", str(DATA), "--val-data", str(HELD_OUT)]
    given += [part for name, value in FLAGS.items() for part in (name, value)] + [*arguments]
    world.on_root(lambda: print("python -m zero_mpi.train", shlex.join(given), flush=True))
    status = train(world, given)
    if status == 0:
        world.on_root(lambda: tell(Path(parse(given).out)))
    return status


if __name__ == "__main__":
    signals.listen()
    run("preferences", command, sys.argv[1:])
