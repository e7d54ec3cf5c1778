"""Turns files into micro-batches: tokenizers, the corpus, and the assignment of samples to ranks.

Nothing in this package depends on MPI or a model. Each function depends only on its arguments (paths, seed,
step, rank), so every rank computes its share alone, and no two ranks can disagree.
"""

from collections.abc import Mapping

from zero_mpi.data.corpus import Corpus, files_of, holds_token_files, sources_of, unigram_entropy
from zero_mpi.data.loader import (
    Batch,
    EvalLoader,
    HeldOut,
    MixedWindows,
    SampleOrder,
    StepLoader,
    Windows,
    WindowSource,
)
from zero_mpi.data.packing import PackedWindows, windows_over
from zero_mpi.data.text_files import collect_files, named
from zero_mpi.data.tokenizers.bpe import BPETokenizer
from zero_mpi.data.tokenizers.byte import ByteTokenizer, Tokenizer
from zero_mpi.data.tokenizers.gguf_tokenizer import GGUFTokenizer
from zero_mpi.data.tokenizers.sentencepiece import MergeTokenizer, UnigramTokenizer
from zero_mpi.data.tokenizers.tokenizer_json import tokenizer_config, tokenizer_from_json, tokenizer_json
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import TEMPLATE, THE_FILE, GGUFKeys

# Value of `tokenizer.ggml.model` -> class of the tokenizer.
KINDS: Mapping[str, type[GGUFTokenizer]] = {
    "gpt2": BPETokenizer,
    "llama": MergeTokenizer,
    "t5": UnigramTokenizer,
}

__all__ = [
    "BPETokenizer",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "EvalLoader",
    "HeldOut",
    "MixedWindows",
    "PackedWindows",
    "SampleOrder",
    "StepLoader",
    "Tokenizer",
    "WindowSource",
    "Windows",
    "collect_files",
    "files_of",
    "holds_token_files",
    "named",
    "sources_of",
    "tokenizer_config",
    "tokenizer_from_json",
    "tokenizer_from_metadata",
    "tokenizer_json",
    "unigram_entropy",
    "windows_over",
]


def tokenizer_from_metadata(metadata: Mapping[str, object], place: str = THE_FILE) -> Tokenizer:
    """Return the tokenizer that a GGUF's keys describe: bytes or one of `KINDS`. `place`: name of the file.

    Raises UsageError for any other tokenizer, and for keys that contradict each other. The error states what
    the keys hold and what the user can do.
    """
    if ByteTokenizer.is_in(metadata, place):
        return ByteTokenizer(GGUFKeys(metadata, place).text(TEMPLATE))
    model = GGUFKeys(metadata, place).tokenizer
    if model is not None and model in KINDS:
        return KINDS[model](metadata, place)
    kind = "no tokenizer" if model is None else f"the tokenizer {show(model)}"
    raise UsageError(
        f"{place} has {kind}, but text needs a byte-level BPE (model 'gpt2') or a SentencePiece tokenizer "
        "('llama', 't5'): use token files for --data, 1-D .npy of uint16 or uint32 ids made with the "
        "model's own tokenizer"
    )
