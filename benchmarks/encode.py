"""Times each kind of tokenizer that zero_mpi reads from GGUF keys, compared with the package `tokenizers`.

    taskset -c 0 python benchmarks/encode.py
    python benchmarks/encode.py --lines

The text is the source code of Python's standard library. `tokenizers` learns the vocabularies from the
beginning of this text. Both programs take turns to encode it, with files or single lines as documents, on the
cores that the process may use. `ratio` is the ratio of medians, above 1 if ours is faster. For the package,
normalizers imitate how SentencePiece treats spaces. Equal numbers of ids show that both did the same work.
"""

import json
import statistics
import sys
import sysconfig
import time
from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from zero_mpi.cli.parser import Parser
from zero_mpi.data import Tokenizer, tokenizer_from_metadata

SPACE, UNKNOWN = "▁", "<unk>"
SPECIAL = [(UNKNOWN, 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python benchmarks/encode.py",
        description="Time the encoding of text as token ids.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--megabytes", type=int, default=4, help="length of the text in MiB")
    parser.add_argument("--vocabulary", type=int, default=8000, help="size of the learned vocabularies")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, in which each tokenizer runs once")
    parser.add_argument("--lines", action="store_true", help="encode each line, not each file, as a document")
    return parser


def files(size: int) -> list[str]:
    """Return the texts of files in Python's standard library, just over `size` characters in total."""
    found, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(errors="replace")
        found.append(text)
        total += len(text)
        if total > size:
            break
    return found


def keys_of(model: str, tokens: Sequence[tuple[str, int]], **more: Any) -> dict[str, Any]:
    """Return the GGUF keys for (token, type) pairs."""
    types = np.array([kind for _, kind in tokens], np.int32)
    names = {"model": model, "tokens": [token for token, _ in tokens], "token_type": types, **more}
    return {f"tokenizer.ggml.{name}": value for name, value in names.items()}


def spaced(library: Any) -> Any:
    """Return a tokenizer of the package, changed to treat spaces as SentencePiece does."""
    normalizers = tokenizers.normalizers
    steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    library.normalizer = normalizers.Sequence(steps)
    return library


def by_merges(text: Sequence[str], size: int) -> tuple[Tokenizer, Any]:
    """Return our tokenizer and the package's for SentencePiece BPE (merges by score)."""
    learnt = tokenizers.Tokenizer(tokenizers.models.BPE())
    learnt.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    learnt.train_from_iterator(text, tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False))
    found = learnt.get_vocab()
    tokens = [*SPECIAL, *((token, 1) for token in sorted(found, key=found.__getitem__) if "\0" not in token)]
    ids = {token: place for place, (token, _) in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token, kind in tokens
        for cut in range(1, len(token))
        if kind == 1 and token[:cut] in ids and token[cut:] in ids
    ]
    scores = -np.arange(len(tokens), dtype=np.float32)
    ours = tokenizer_from_metadata(keys_of("llama", tokens, scores=scores))
    options = {"byte_fallback": True, "unk_token": UNKNOWN, "fuse_unk": True}
    return ours, spaced(tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, **options)))


def by_likelihood(text: Sequence[str], size: int) -> tuple[Tokenizer, Any]:
    """Return our tokenizer and the package's for a SentencePiece unigram model."""
    learnt = tokenizers.Tokenizer(tokenizers.models.Unigram())
    learnt.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=size, show_progress=False, unk_token=UNKNOWN)
    learnt.train_from_iterator(text, trainer)
    vocabulary = [(token, score) for token, score in json.loads(learnt.to_str())["model"]["vocab"]]
    tokens = [(token, 2 if token == UNKNOWN else 1) for token, _ in vocabulary]
    unknown = tokens.index((UNKNOWN, 2))
    scores = np.array([score for _, score in vocabulary], np.float32)
    more = {"scores": scores, "unknown_token_id": np.uint32(unknown), "add_space_prefix": True}
    wide = [(token, float(score)) for (token, _), score in zip(vocabulary, scores, strict=True)]
    ours = tokenizer_from_metadata(keys_of("t5", tokens, **more))
    return ours, spaced(tokenizers.Tokenizer(tokenizers.models.Unigram(wide, unknown, False)))


def by_bytes(text: Sequence[str], size: int) -> tuple[Tokenizer, Any]:
    """Return our tokenizer and the package's for byte-level BPE. The package learns the merges."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    learnt = tokenizers.Tokenizer(tokenizers.models.BPE())
    learnt.pre_tokenizer = byte_level(add_prefix_space=False)
    alphabet = byte_level.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learnt.train_from_iterator(text, trainer)
    found = learnt.get_vocab()
    tokens = [(token, 1) for token in sorted(found, key=found.__getitem__)]
    merges = [" ".join(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
    return tokenizer_from_metadata(keys_of("gpt2", tokens, pre="gpt-2", merges=merges)), learnt


KINDS: dict[str, Callable[[Sequence[str], int], tuple[Tokenizer, Any]]] = {
    "merges by score (llama)": by_merges,
    "unigram (t5)": by_likelihood,
    "byte-level BPE (gpt2)": by_bytes,
}


def timed(encode: Callable[[Sequence[str]], Any], documents: Sequence[str]) -> tuple[float, int]:
    """Encode the documents. Return the seconds that it took, and the number of ids."""
    start = time.perf_counter()
    found = encode(documents)
    return time.perf_counter() - start, sum(map(len, found))


def compared(name: str, ours: Tokenizer, library: Any, documents: Sequence[str], rounds: int) -> str:
    """Time both tokenizers. Return a line with their rates, the ratio, and their numbers of ids."""

    def by_library(texts: Sequence[str]) -> list[Any]:
        found = library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in found]

    size = sum(len(text.encode()) for text in documents) / 1e6
    ours.encode(documents[0])  # the first call builds tables and compiles loops
    turns = [(*timed(ours.encode_batch, documents), *timed(by_library, documents)) for _ in range(rounds)]
    here, ids, there, others = map(statistics.median, zip(*turns, strict=True))
    rates = f"{size / here:6.1f} MB/s, tokenizers {size / there:6.1f} MB/s, ratio {there / here:5.2f}"
    return f"{name:24} {rates}; {ids} and {others} ids"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each kind of tokenizer."""
    options = make_parser().parse_args(arguments)
    documents = files(options.megabytes << 20)
    beginning = "".join(documents)[: 1 << 20].splitlines(keepends=True)
    if options.lines:
        documents = [line for text in documents for line in text.splitlines(keepends=True)]
    print(f"{sum(map(len, documents)) / 1e6:.1f} million characters in {len(documents)} documents")
    for name, make in KINDS.items():
        print(compared(name, *make(beginning, options.vocabulary), documents, options.rounds), flush=True)


if __name__ == "__main__":
    sys.exit(main())
