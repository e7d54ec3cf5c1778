"""From files to micro-batches: the tokenizer, the corpus, and which global sample goes to which rank.

Nothing here knows MPI or a model. Each piece is a function of its arguments alone (paths, seed, step, rank),
so every rank works out its own part and no two can disagree.
"""

from zero_mpi.data.corpus import (
    Corpus,
    collect_files,
    holds_token_files,
    load_corpus,
    stdlib_files,
    unigram_entropy,
)
from zero_mpi.data.loader import Batch, EvalLoader, StepLoader, Windows, window_of
from zero_mpi.data.tokenizer import ByteTokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "EvalLoader",
    "StepLoader",
    "Windows",
    "collect_files",
    "holds_token_files",
    "load_corpus",
    "stdlib_files",
    "unigram_entropy",
    "window_of",
]
