r"""Pre-tokenizers: regexes by which a byte-level BPE tokenizer cuts text into words, known by names in GGUF.

`tokenizer.ggml.pre` names regexes that the file does not contain, so readers must know them. Each regex is
applied inside the pieces that the previous regex left; text that no regex matches is a piece too. Names and
regexes are from llama.cpp (src/llama-vocab.cpp, `llm_tokenizer_bpe` and `load`), so that a GGUF gives the
same ids as in llama.cpp. Some of them only approximate the regexes of the original tokenizers (tekken,
gpt-4o, deepseek). The exact regexes are in `original` and are used for a folder whose tokenizer.json has
them. Wrong regexes would give wrong ids without an error, so an unknown name is refused.
"""

# ruff: noqa: RUF001 (classes of letters of many scripts)

from typing import Any, NamedTuple

from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show, shown

# The library's version of Unicode defines which characters are letters and digits: 16 when this was written;
# llama.cpp has 15.1, so about 4400 code points are letters only here. Ids differ if an apostrophe follows one
# of these, or if a vocabulary merges its last byte with a neighbour; with deepseek-v3 also at new symbols.

# GPT-2's encoder.py (Radford et al. 2019).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
# The first group of Llama 3's tokenizer.json ignores case, so it also matches U+017F as an s. llama.cpp lists
# small and capital letters instead, and so does this regex.
_IGNORING_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER
# From Qwen 2's tokenizer.json: as for Llama 3, but one digit at a time.
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _AFTER.replace(r"\p{L}", r"\p{L}\p{M}")
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


def _by_case(upper: str, lower: str, contractions: str, digits: str) -> str:
    """Return the regex of tekken or gpt-4o, where a word also ends between a small and a capital letter."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{contractions}|{lead}{upper}+{lower}*{contractions}"
    return f"{words}|{digits}" + _AFTER.replace(r"[\r\n]*", r"[\r\n/]*")


_CASES = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES_OF_ASCII = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"  # "É" is a small letter too, as in llama.cpp
# If a regex names no category of characters, llama.cpp replaces a non-ASCII space by a tab.
_LINE_ENDS, _CJK, _CJK_NO_SPACES = r"[\r\n]", "[一-龥ࠀ-一가-퟿]+", r"[一-龥ࠀ-一가-퟿&&\S]+"
_CASED = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝ\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎ"
    "ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_SIGNS, _LAST_SPACES = r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$"
_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


class PreTokenizer(NamedTuple):
    """The regexes of one name, and the settings that llama.cpp uses with this name."""

    regexes: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token becomes that token, even if the merges say otherwise
    add_bos: bool = False  # the value if the file has no key for it
    original: tuple[str, ...] = ()  # regexes of tokenizer.json, if they differ from llama.cpp's
    passes_letters: bool = False  # a non-ASCII letter may match no regex; it then forms a piece with spaces


_DEFAULT = PreTokenizer((_PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_PLAIN, _DIGITS = PreTokenizer((GPT2,)), PreTokenizer((_DIGIT, GPT2))
_THREES, _ONES = PreTokenizer((_LLAMA3,)), PreTokenizer((_QWEN2,))
_WHOLE_WORDS = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_TEKKEN = PreTokenizer(
    *((_by_case(*_CASES_OF_ASCII, "", _DIGIT),), True, True), original=(_by_case(*_CASES, "", _DIGIT),)
)
_GPT4O = PreTokenizer(
    (_by_case(*_CASES_OF_ASCII, f"{_CONTRACTIONS}?", _THREE_DIGITS),),
    original=(_by_case(*_CASES, f"{_IGNORING_CASE}?", _THREE_DIGITS),),
)
_LLM = PreTokenizer(
    (_LINE_ENDS, _CASED, _SIGNS.replace("　-", "、-"), _LAST_SPACES, _CJK_NO_SPACES, r"\p{N}+"),
    original=(_LINE_ENDS, _CASED, _SIGNS, _LAST_SPACES, _CJK, _DIGIT),
    passes_letters=True,
)
_CODER = PreTokenizer(
    (_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _CJK_NO_SPACES, _DIGIT),
    original=(_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT),
)
_V3 = PreTokenizer((_THREE_DIGITS, _KANA, _DEEPSEEK3))

# If several names have the same regexes, a tokenizer.json with these regexes gets the first of the names.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "trillion"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"), _WHOLE_WORDS),
    **dict.fromkeys(("pixtral", "midm-2.0"), _WHOLE_WORDS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2"), _ONES),
    **dict.fromkeys(("kormo", "f2llmv2"), _ONES),
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "deepseek-llm": _LLM,
    "deepseek-coder": _CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _V3),
    "default": _DEFAULT,
}


def pre_tokenizer(name: str | None, place: str) -> PreTokenizer:
    """Return the entry that a file's `tokenizer.ggml.pre` names; without this key, the entry "default".

    Raises UsageError for an unknown name. `place`: name of the file.
    """
    if (name or "default") in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name or "default"]
    raise UsageError(
        f"{place} has tokenizer.ggml.pre {show(str(name))}, expected one of {', '.join(PRE_TOKENIZERS)}: use "
        "token files for --data (1-D .npy of uint16 or uint32 ids)"
    )


def name_of(definition: Any, ignore_merges: bool, place: str) -> tuple[str, dict[str, bool]]:
    """Return the name of a tokenizer.json's `pre_tokenizer`, and the settings that llama.cpp does not follow:
    `original` regexes, `ignore_merges`. Raise UsageError, beginning with `place`, if no name fits.
    """
    steps = definition.get("pretokenizers") if _is(definition, "Sequence") else [definition]
    regexes = _regexes(steps if isinstance(steps, list) else [])
    spelt_out = regexes and tuple(regex.replace(_IGNORING_CASE, _CONTRACTIONS) for regex in regexes)
    matches = [
        ({"original": True} if regexes == entry.original else {}, entry.ignore_merges, name)
        for name, entry in PRE_TOKENIZERS.items()
        if regexes and (entry.original == regexes or entry.regexes == spelt_out)
    ]
    for rules, merges, name in sorted(matches, key=lambda match: match[1] != ignore_merges)[:1]:
        return name, rules | ({} if merges == ignore_merges else {"ignore_merges": ignore_merges})
    raise UsageError(
        f"{place}: expected the splitting of a known BPE (gpt-2, smollm, llama-bpe, qwen2, ...), found the "
        f"pre_tokenizer {shown(definition, 300)}: use token files for train --data (1-D .npy)"
    )


def _is(definition: Any, kind: str) -> bool:
    return isinstance(definition, dict) and definition.get("type") == kind


def _regexes(steps: list[Any]) -> tuple[str, ...] | None:
    """Return the regexes of consecutive pre-tokenizers; None if one of these steps is unknown."""
    *splits, last = steps or [None]
    if not _is(last, "ByteLevel") or last.get("add_prefix_space", True):
        return None
    regexes = [regex for step in splits if (regex := _regex(step)) is not None]
    builtin = [GPT2] if last.get("use_regex", True) else []
    return (*regexes, *builtin) if len(regexes) == len(splits) else None


def _regex(step: Any) -> str | None:
    if _is(step, "Digits") and step.get("individual_digits") is True:
        return _DIGIT
    if not _is(step, "Split") or step.get("behavior") != "Isolated" or step.get("invert"):
        return None
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    return regex.replace("\r", r"\r").replace("\n", r"\n") if isinstance(regex, str) else None
