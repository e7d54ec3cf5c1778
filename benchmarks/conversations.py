"""Times the encoding of conversations, compared with Transformers and `tokenizers` on the same cores.

    taskset -c 0 python benchmarks/conversations.py MODEL.gguf

Rows of one to six turns with random words, from a fixed seed, are written as JSON Lines. Both programs take
turns to read the file, render each row with the model's chat template and encode it. Ours also finds the
tokens that count in the loss. `ratio` is the ratio of the medians, above 1 if ours is faster.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from argparse import ArgumentDefaultsHelpFormatter
from pathlib import Path

from transformers import AutoTokenizer

from zero_mpi.checkpoint.weights import open_weights
from zero_mpi.cli.parser import Parser
from zero_mpi.commands.export.huggingface import write_tokenizer
from zero_mpi.config.inputs import read_model, tokenizer_of
from zero_mpi.data.conversations.tokenized import ConversationReader

WORDS = [
    "the",
    "a",
    "model",
    "shard",
    "rank",
    "learns",
    "reads",
    "gathers",
    "sums",
    "each",
    "of",
    "its",
    "own",
    "small",
    "large",
    "text,",
    "and",
    "then",
    "writes",
]


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python benchmarks/conversations.py",
        description="Time the encoding of conversations as token ids.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="GGUF file of a model with a chat template")
    parser.add_argument("--rows", type=int, default=3000, help="conversations")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, in which each program runs once")
    return parser


def write_rows(path: Path, count: int) -> None:
    """Write conversations of one to six turns. A turn is a message of the user and the answer to it."""
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            messages = [
                {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(5, 80)))}
                for _ in range(draw.randint(1, 6))
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Time both programs, which take turns. Print a line for each run, and the ratio."""
    options = make_parser().parse_args(sys.argv[1:])
    source = open_weights(options.model)
    tokenizer = tokenizer_of(source, read_model(source))
    with tempfile.TemporaryDirectory() as place:
        folder, path = Path(place), Path(place) / "rows.jsonl"
        write_tokenizer(source, folder)
        write_rows(path, options.rows)
        library = AutoTokenizer.from_pretrained(folder)

        def ours() -> int:
            return sum(len(row.ids) for row in ConversationReader(tokenizer).read([(path.name, path)]))

        def theirs() -> int:
            rows = (json.loads(line)["messages"] for line in path.open())
            return sum(len(library.apply_chat_template(row, return_dict=True)["input_ids"]) for row in rows)

        seconds: dict[str, list[float]] = {"zero_mpi": [], "Transformers": []}
        for _ in range(options.rounds):
            for (name, times), read in zip(seconds.items(), (ours, theirs), strict=True):
                begun = time.perf_counter()
                count = read()
                times.append(time.perf_counter() - begun)
                print(f"{name:13} {count:,} ids  {count / times[-1] / 1e3:.0f} thousand per second")
        ours_took, theirs_took = map(statistics.median, seconds.values())
        print(f"ratio {theirs_took / ours_took:.2f}")


if __name__ == "__main__":
    main()
