"""A tokenizer.json becomes GGUF keys that give the library's ids, and can be written again."""

import copy
import json
import random

import bpe_files
import numpy as np
import pytest

from zero_mpi.data import BPETokenizer, tokenizer_config, tokenizer_from_json, tokenizer_json
from zero_mpi.data.tokenizers.huggingface_rules import FLAGS
from zero_mpi.errors import UsageError

tokenizers = pytest.importorskip(
    "tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError
)

TEXTS = [*bpe_files.TEXTS, *bpe_files.random_texts(60)]
# Here the library differs from llama.cpp: U+017F counts as an s, and the leftmost token is matched first.
APART = ("\u017f", "l><tool")
KEY = "tokenizer.ggml."
NO_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.fixture(scope="module", params=bpe_files.KINDS)
def content(request):
    return bpe_files.trained_json(request.param)


@pytest.fixture(scope="module")
def plain():
    return bpe_files.trained_json("qwen2", tokens=300)


def library_of(content):
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def both_ids(content, tokenizer):
    """Yield the library's ids, with control tokens parsed, and the package's ids."""
    theirs = library_of(content)
    for text in TEXTS:
        if not any(part in text for part in APART):
            ours = tokenizer.encode(text, special=True).tolist()
            yield theirs.encode(text, add_special_tokens=False).ids, ours


# reading


def test_the_ids_are_those_of_the_library_on_the_file(content, tmp_path):
    tokenizer = tokenizer_from_json(bpe_files.write_json(tmp_path, content))
    pairs = list(both_ids(content, tokenizer))
    assert len(pairs) > 150
    assert all(ours == theirs for theirs, ours in pairs)


def test_tokens_types_and_gaps_are_llama_cpps_converters(plain, tmp_path):
    names = {*bpe_files.CONTROL, *bpe_files.USERS}
    vocabulary = {token: place for token, place in plain["model"]["vocab"].items() if token not in names}
    added = [
        {"id": 302, "content": "odd", "special": True},
        {"id": 310, "content": "<|looks|>", "special": False},
        {"id": 311, "content": "<think>", "special": False},
    ]
    model = plain["model"] | {"vocab": vocabulary | {"<|looks|>": 310, "<think>": 311}}
    content = plain | {"model": model, "added_tokens": [token | NO_FLAGS for token in added]}
    library = library_of(content)
    assert [library.token_to_id(token["content"]) for token in added] == [302, 310, 311]
    keys = tokenizer_from_json(bpe_files.write_json(tmp_path, content), vocab_size=320).metadata()
    tokens, types = keys[KEY + "tokens"], keys[KEY + "token_type"]
    assert (len(tokens), types.dtype, len(types)) == (320, np.int32, 320)
    assert tokens[309:313] == ["[PAD309]", "<|looks|>", "<think>", "[PAD312]"]
    assert types[309:313].tolist() == [5, 3, 4, 5]
    assert (tokens[302], types[302]) == ("odd", 3)
    size = len(vocabulary)
    assert all(tokens[place] == token for token, place in vocabulary.items())
    assert tokens[303:310] == [f"[PAD{place}]" for place in range(303, 310)]
    assert set(types[:size].tolist()) == {1}
    assert set(types[303:310].tolist()) == {5}


def test_merges_may_be_texts_or_pairs(plain, tmp_path):
    assert isinstance(plain["model"]["merges"][0], list)
    texts = copy.deepcopy(plain)
    texts["model"]["merges"] = [" ".join(pair) for pair in plain["model"]["merges"]]
    first = tokenizer_from_json(bpe_files.write_json(tmp_path / "pairs", plain)).metadata()
    second = tokenizer_from_json(bpe_files.write_json(tmp_path / "texts", texts)).metadata()
    assert first[KEY + "merges"] == second[KEY + "merges"] == texts["model"]["merges"]


def test_special_tokens_come_from_the_files_beside(plain, tmp_path):
    ids = {token["content"]: token["id"] for token in plain["added_tokens"]}
    config = {
        "bos_token": {"content": "<|begin|>"},
        "eos_token": "<|endoftext|>",
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": "{{ messages }}",
    }
    others = {"tokenizer_config": config, "config": {"eos_token_id": 1, "pad_token_id": 2}}
    keys = tokenizer_from_json(bpe_files.write_json(tmp_path, plain, **others)).metadata()
    special = {key.removeprefix(KEY): value for key, value in keys.items() if "_token" in key[len(KEY) :]}
    assert special == {
        "bos_token_id": ids["<|begin|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "padding_token_id": 2,
        "add_bos_token": True,
        "add_eos_token": False,
    }
    assert type(special["eos_token_id"]) is np.uint32
    assert keys["tokenizer.chat_template"] == "{{ messages }}"


def test_ids_of_a_models_configuration_do_too_and_a_file_with_the_template(plain, tmp_path):
    path = bpe_files.write_json(
        tmp_path, plain, generation_config={"eos_token_id": [5, 6], "bos_token_id": 4}
    )
    (tmp_path / "chat_template.jinja").write_text("{{ naïve }}", encoding="utf-8")
    tokenizer = tokenizer_from_json(path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (4, 5, False)
    assert tokenizer.metadata()["tokenizer.chat_template"] == "{{ naïve }}"


@pytest.mark.parametrize("config", [{}, {"bos_token": "<|begin|>"}])
def test_a_template_that_puts_a_bos_in_front_is_kept(plain, config, tmp_path):
    place = next(token["id"] for token in plain["added_tokens"] if token["content"] == "<|begin|>")
    library = library_of(plain)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<|begin|>", "$A"], pair=None, special_tokens=[("<|begin|>", place)]
    )
    path = bpe_files.write_json(tmp_path, json.loads(library.to_str()), tokenizer_config=config)
    tokenizer = tokenizer_from_json(path)
    assert tokenizer.encode_prompt("x").tolist() == library.encode("x").ids == [place, *tokenizer.encode("x")]


# rules without a GGUF key in llama.cpp; the package tokenizers gives the expected ids

LOWER = [
    {"type": "NFD"},
    {"type": "Lowercase"},
    {"type": "Replace", "pattern": {"String": "é"}, "content": "ee"},
]
NORMALIZERS = [
    *(None, *({"type": name} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"))),
    *({"type": "Strip", "strip_left": a, "strip_right": b} for a in (False, True) for b in (False, True)),
    {"type": "Prepend", "prepend": "_"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
    {"type": "Sequence", "normalizers": LOWER},
]
MORE = ("abc", "bc", "a", "É!", "<MASK>", "٣", "_")


def with_flags(content, normalizer, draw):
    """Return a tokenizer.json with a normalizer and overlapping added tokens, whose flags are drawn."""
    content, names = copy.deepcopy(content), (*bpe_files.CONTROL, "<tool>", "l><tool", *MORE)
    vocabulary = content["model"]["vocab"]
    for name in (*bpe_files.CONTROL, *bpe_files.USERS):
        del vocabulary[name]
    added = [name for name in names if name not in vocabulary]
    ids = {name: len(vocabulary) + place for place, name in enumerate(added)}
    content["added_tokens"] = [
        {"id": (vocabulary | ids)[name], "content": name, "special": draw.random() < 0.5}
        | {flag: draw.random() < 0.4 for flag in FLAGS}
        for name in names
    ]
    return content | {"normalizer": normalizer}


@pytest.mark.parametrize("number", range(len(NORMALIZERS)))
def test_flags_of_added_tokens_and_normalizers_are_those_of_the_library(number, plain, tmp_path):
    draw = random.Random(number)
    for _ in range(3):
        content = with_flags(plain, NORMALIZERS[number], draw)
        tokenizer = tokenizer_from_json(bpe_files.write_json(tmp_path, content))
        names = [token["content"] for token in content["added_tokens"]]
        texts = list(bpe_files.mixed_texts(60, names, draw.random()))
        theirs = [ids.ids for ids in library_of(content).encode_batch(texts, add_special_tokens=False)]
        assert [tokenizer.encode(text, special=True).tolist() for text in texts] == theirs
        for text, ids, (same, lengths) in zip(
            texts, theirs, tokenizer.encode_with_lengths(texts), strict=True
        ):
            assert same.tolist() == ids
            assert lengths.sum() == len(text.encode()) or not ids
        file = tokenizer_json(tokenizer.metadata())
        back = tokenizer_from_json(bpe_files.write_json(tmp_path / "back", file))
        assert [ids.ids for ids in library_of(file).encode_batch(texts, add_special_tokens=False)] == theirs
        assert [ids.tolist() for ids in back.encode_batch(texts, special=True)] == theirs


@pytest.mark.parametrize(
    ("kind", "content", "flags"),
    [
        ("NFC", "\n", {"lstrip": True}),
        ("Strip", " ", {}),
        ("Lowercase", "<|BEGIN|>", {}),
        ("Replace", "a", {}),
    ],
)
def test_tokens_that_the_library_does_not_find_are_refused(kind, content, flags, plain, tmp_path):
    normalizer = {"type": kind, "strip_left": True, "strip_right": True}
    normalizer |= {"pattern": {"String": "a"}, "content": ""}
    changed = copy.deepcopy(plain)
    for token in changed["added_tokens"]:
        token["normalized"] = True
    token = changed["added_tokens"][-1]
    del changed["model"]["vocab"][token["content"]]
    changed["added_tokens"][-1] = token | flags | {"content": content}
    changed["model"]["vocab"] = {t: i for t, i in changed["model"]["vocab"].items() if t != content}
    changed["model"]["vocab"][content] = token["id"]
    with pytest.raises(UsageError, match="added token"):
        tokenizer_from_json(bpe_files.write_json(tmp_path, changed | {"normalizer": normalizer}))


def test_tokens_stand_for_the_bytes_that_the_normalizer_made_them_of(plain, tmp_path):
    content = plain | {"normalizer": {"type": "NFC"}}
    tokenizer = tokenizer_from_json(bpe_files.write_json(tmp_path, content))
    [(ids, lengths)] = tokenizer.encode_with_lengths(["e\u0301<|im_start|>日e\u0301"])
    place = ids.tolist().index(next(t["id"] for t in plain["added_tokens"] if t["content"] == "<|im_start|>"))
    assert (lengths[:place].sum(), lengths[place], lengths[place + 1 :].sum()) == (3, 12, 6)


def test_flags_of_the_configuration_go_before_those_of_the_file(plain, tmp_path):
    transformers = pytest.importorskip("transformers")
    flagged = {str(t["id"]): t | {"rstrip": True} for t in plain["added_tokens"]}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": flagged}
    tokenizer = tokenizer_from_json(bpe_files.write_json(tmp_path, plain, tokenizer_config=names))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a <|im_start|> \n b", "<tool>  x"):
        assert tokenizer.encode(text, special=True).tolist() == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["qwen2", "llama-bpe"])
def test_ignore_merges_is_the_folders(kind, tmp_path):
    """With ignore_merges, a word that is a token is not split; in a GGUF, tokenizer.ggml.pre implies this."""
    content = bpe_files.trained_json(kind, tokens=300)
    model, ignores = content["model"], kind == "qwen2"
    first = len(model["vocab"]) + len(content["added_tokens"])
    content["model"] = model | {"ignore_merges": ignores, "vocab": model["vocab"] | {"qzq": first}}
    tokenizer = tokenizer_from_json(bpe_files.write_json(tmp_path, content))
    ids = tokenizer.encode("qzq").tolist()
    assert ids == library_of(content).encode("qzq").ids
    assert (len(ids) == 1, tokenizer.metadata()[KEY + "pre"]) == (ignores, kind if ignores else "dbrx")


U, W = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
SLASH = bpe_files.REST.replace(r"[\r\n]*", r"[\r\n/]*")
CUTS = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
V3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
V3 += " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
KANA = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
QWEN35 = bpe_files.CASELESS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
QWEN35 += bpe_files.REST.replace(r"\p{L}", r"\p{L}\p{M}")


def cased(contraction, digits):
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}[{U}]*[{W}]+{contraction}|{lead}[{U}]+[{W}]*{contraction}|{digits}{SLASH}"


# Regexes from the files of Mistral Nemo, gpt-oss and Llama 4, Qwen 3.5, DeepSeek Coder and V3; None: a digit.
FOLDERS_CUTS = {
    "tekken": [cased("", r"\p{N}")],
    "gpt-4o": [cased(f"{bpe_files.CASELESS}?", r"\p{N}{1,3}")],
    "qwen35": [QWEN35],
    "deepseek-coder": [*CUTS, None],
    "deepseek-v3": [r"\p{N}{1,3}", KANA, V3],
}


@pytest.mark.parametrize("pre", FOLDERS_CUTS)
def test_words_of_a_folder_are_cut_by_its_own_regex_and_named_for_llama_cpp(pre, plain, tmp_path):
    steps = [
        {"type": "Digits", "individual_digits": True}
        if regex is None
        else {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in FOLDERS_CUTS[pre]
    ]
    bytewise = bpe_files.GPT2 | {"use_regex": False}
    content = copy.deepcopy(plain)
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, bytewise]}
    content["model"]["ignore_merges"] = pre in ("tekken", "gpt-4o")
    tokenizer = tokenizer_from_json(bpe_files.write_json(tmp_path, content))
    assert tokenizer.metadata()[KEY + "pre"] == pre
    library = library_of(content)
    for text in bpe_files.mixed_texts(300):
        if not any(part in text for part in APART) or pre == "gpt-4o":
            assert tokenizer.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids


# refusing


def set_at(content, *steps, value):
    """Return a copy with one value replaced."""
    content = copy.deepcopy(content)
    place = content
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = value
    return content


SPLIT = ("pre_tokenizer", "pretokenizers", 0)


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("model", "type"), "Unigram", "expected a tokenizer.json with a byte-level BPE, found the model"),
        (("model", "vocab"), [], "expected a tokenizer.json with a byte-level BPE"),
        (("model", "end_of_word_suffix"), "</w>", "found end_of_word_suffix </w>"),
        (("model", "merges"), [], "no tokenizer.ggml.merges"),
        (("model", "merges"), [["a", "b", "c"]], "expected merges as 'a b'"),
        (("model", "merges"), [["a ", "b"]], "expected two parts of a token"),
        (("normalizer",), {"type": "BertNormalizer"}, "found the normalizer .*BertNormalizer"),
        (("normalizer",), {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}, "Regex"),
        (("normalizer",), {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 17}, "16 times"),
        (("normalizer",), {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 200}, "16 times"),
        (("pre_tokenizer",), None, "splitting of a known BPE .* found the pre_tokenizer None"),
        (("pre_tokenizer",), bpe_files.GPT2 | {"add_prefix_space": True}, "found the pre_tokenizer"),
        ((*SPLIT, "pattern"), {"Regex": r"\w+"}, "found the pre_tokenizer"),
        ((*SPLIT, "behavior"), "Removed", "found the pre_tokenizer"),
        (("added_tokens", 0, "id"), 7, "expected the added token '<.begin.>' with the id 302"),
        (("added_tokens", 0, "id"), 1 << 40, "with the id 302"),
        (("model", "vocab", "a"), 1 << 40, "expected ids without large gaps"),
        (("added_tokens", 0, "content"), "a", "expected the added token 'a' with the id"),
        (("model", "vocab", "a"), 1, "expected one token for each id"),
    ],
)
def test_what_keys_cannot_hold_is_refused(plain, way, value, message, tmp_path):
    path = bpe_files.write_json(tmp_path, set_at(plain, *way, value=value))
    with pytest.raises(UsageError, match=rf"tokenizer\.json: .*{message}"):
        tokenizer_from_json(path)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(plain, tmp_path):
    with pytest.raises(UsageError, match="the model's vocabulary, 100"):
        tokenizer_from_json(bpe_files.write_json(tmp_path, plain), vocab_size=100)


# writing


def test_the_way_back_has_the_same_ids_and_keys(content, tmp_path):
    tokenizer = tokenizer_from_json(bpe_files.write_json(tmp_path / "there", content))
    file = tokenizer_json(tokenizer.metadata())
    assert all(ours == theirs for theirs, ours in both_ids(file, tokenizer))
    twin = tokenizer_from_json(bpe_files.write_json(tmp_path / "back", file), tokenizer.vocab_size)
    assert_equal_keys(twin.metadata(), tokenizer.metadata())


def assert_equal_keys(actual, expected):
    assert set(actual) == set(expected)
    for key, value in expected.items():
        assert np.array_equal(actual[key], value), key


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_special_tokens_and_the_template_come_back_too(pre, plain, tmp_path):
    config = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>", "chat_template": "{{ x }}"}
    content = bpe_files.trained_json(pre, tokens=300)
    path = bpe_files.write_json(tmp_path / "a", content, tokenizer_config=config | {"add_bos_token": True})
    keys = tokenizer_from_json(path).metadata()
    others = {"tokenizer_config": tokenizer_config(keys)}
    twin = tokenizer_from_json(bpe_files.write_json(tmp_path / "b", tokenizer_json(keys), **others))
    assert_equal_keys(twin.metadata(), keys)
    prompt = library_of(tokenizer_json(keys)).encode("naïve <|im_start|>x").ids
    assert prompt == twin.encode_prompt("naïve <|im_start|>x").tolist()


def test_the_real_models_tokenizer_can_be_written(tmp_path):
    keys = bpe_files.smollm2_keys()
    ours = BPETokenizer(keys)
    file = tokenizer_json(keys)
    lacking = {chr(code) for code in (4, 6, 0x13, 0x14, 0x16, 0x1D)}
    library = library_of(file)
    for text in TEXTS:
        if not lacking & set(text):
            ids = library.encode(text).ids
            assert ids == ours.encode(text, special=True).tolist()
    path = bpe_files.write_json(tmp_path, file, tokenizer_config=tokenizer_config(keys))
    assert tokenizer_from_json(path).tokens == ours.tokens
