r"""How a byte-level BPE tokenizer cuts text into words before it merges, by the name in a GGUF.

`tokenizer.ggml.pre` names regexes that a file does not hold; whoever reads it must know them. They are
applied in turn, each within the pieces of the one before, and what no regex matches is a piece too. Names and
regexes are those of llama.cpp (src/llama-vocab.cpp, `llm_tokenizer_bpe` and `load`). Left out are names where
its regexes only come near those that the vocabulary was made with (tekken, gpt-4o): two truths there. With
another splitting text would be read wrong and nobody would notice, so an unknown name is refused.
"""

from typing import Any, NamedTuple

from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show, shown

# Letters and digits are those of the library's Unicode: 16 at the time of writing, llama.cpp's is 15.1. So
# some 4400 code points of 2024 are letters here and not there, which shows in ids where an apostrophe follows
# one, or if a vocabulary merges its last byte with what stands beside it.

# GPT-2's encoder.py (Radford et al. 2019).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
# Llama 3's tokenizer.json ignores case in the first group, which would also take U+017F for an s; llama.cpp
# spells it out, so it is spelt out here.
_IGNORING_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER
# Qwen 2's tokenizer.json: Llama 3's, one digit at a time.
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


class PreTokenizer(NamedTuple):
    """The regexes of a name, and two settings that llama.cpp ties to it."""

    regexes: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


_DEFAULT = PreTokenizer((_PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_PLAIN, _DIGITS = PreTokenizer((GPT2,)), PreTokenizer((_DIGIT, GPT2))
_THREES, _ONES = PreTokenizer((_LLAMA3,)), PreTokenizer((_QWEN2,))
_WHOLE_WORDS = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)

# The first name with certain regexes is the one that a tokenizer.json with them gets.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "trillion"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"), _WHOLE_WORDS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2"), _ONES),
    "default": _DEFAULT,
}


def pre_tokenizer(name: str | None, place: str) -> PreTokenizer:
    """The entry of `tokenizer.ggml.pre` of the file at `place`. UsageError for a name not known, or none."""
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    found = "no tokenizer.ggml.pre" if name is None else f"tokenizer.ggml.pre {show(name)}"
    raise UsageError(
        f"{place} has {found}, expected one of {', '.join(PRE_TOKENIZERS)}: "
        "give --data as token files (1-D .npy of uint16 or uint32 ids)"
    )


def name_of(definition: Any, ignore_merges: bool, where: str) -> str:
    """The name for a tokenizer.json's `pre_tokenizer`. UsageError, beginning with `where`, without one."""
    steps = definition.get("pretokenizers") if _is(definition, "Sequence") else [definition]
    regexes = _regexes(steps if isinstance(steps, list) else [])
    for name, known in PRE_TOKENIZERS.items():
        if (known.regexes, known.ignore_merges) == (regexes, ignore_merges):
            return name
    merges = "ignore_merges and " if ignore_merges else ""
    raise UsageError(
        f"{where}: expected the splitting of a known BPE (gpt-2, smollm, llama-bpe, qwen2, ...), found "
        f"{merges}the pre_tokenizer {shown(definition, 300)}: give --data as token files (1-D .npy)"
    )


def _is(definition: Any, kind: str) -> bool:
    return isinstance(definition, dict) and definition.get("type") == kind


def _regexes(steps: list[Any]) -> tuple[str, ...] | None:
    """The regexes that pre-tokenizers in a row stand for; None if they are none of those known here."""
    *splits, last = steps or [None]
    if not _is(last, "ByteLevel") or last.get("add_prefix_space", True):
        return None
    found = [_regex(step) for step in splits]
    if None in found:
        return None
    own = [GPT2] if last.get("use_regex", True) else []
    return tuple([regex for regex in found if regex is not None] + own)


def _regex(step: Any) -> str | None:
    if _is(step, "Digits") and step.get("individual_digits") is True:
        return _DIGIT
    if not _is(step, "Split") or step.get("behavior") != "Isolated" or step.get("invert"):
        return None
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    return regex.replace(_IGNORING_CASE, _CONTRACTIONS) if isinstance(regex, str) else None
