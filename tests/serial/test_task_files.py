"""Published task files have the same log-likelihoods and shares as in lm-evaluation-harness and CORE."""

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece_files
from bpe_files import TINY
from jobs import run_job
from oracles import smollm2
from test_command_bits import needs_mpiexec
from test_evaluate import surprises
from test_generate import write_model

from zero_mpi.commands.evaluate.choices import encode_choices, read_choices, with_shots
from zero_mpi.commands.evaluate.scores import choice_figures
from zero_mpi.commands.evaluate.task import read_task
from zero_mpi.data import ByteTokenizer, tokenizer_from_metadata
from zero_mpi.errors import FileError, UsageError
from zero_mpi.train.text_model import TextModel

QA = "Question: {}\nAnswer:"
STEM = {"stem": "Why?", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]}
FLAT = {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}}
LISTED = "Why?\nA. a\nB. b\nAnswer:"
ABOUT = "The following are multiple choice questions (with answers) about us history.\n\n"
SCIQ = {"question": "Why?", "distractor1": "a", "distractor2": "b", "distractor3": "c", "correct_answer": "d"}
PUBLISHED = [  # file, line, contexts, answers, index of the right answer, as in lm_eval/tasks or CORE
    ("ARC-Easy-Test.jsonl", {"id": "MCAS_2000_4", "question": STEM, "answerKey": "B"}, [QA.format("Why?")],
     [" a", " b"], 1),
    ("OpenBookQA.jsonl", {"id": "8-343", "question": STEM, "answerKey": "A"}, ["Why?"], [" a", " b"], 0),
    ("dev_rand_split.jsonl", {"question": {"question_concept": "x", **STEM}, "answerKey": "B"},
     [f"Question: {LISTED}"], [" A", " B"], 1),
    ("csqa.jsonl", {**FLAT, "question_concept": "x", "answerKey": "A"}, [f"Question: {LISTED}"],
     [" A", " B"], 0),
    ("mmlu.jsonl", {"question": " Why?\n", "subject": "us_history", "choices": ["a", "b"], "answer": 1},
     [ABOUT + LISTED], [" A", " B"], 1),
    ("sciq.jsonl", {**SCIQ, "support": " So. "}, ["So. \n" + QA.format("Why?")],
     [" a", " b", " c", " d"], 3),
    ("boolq.jsonl", {"passage": "It is.", "question": "is it", "title": "x", "answer": True},
     ["It is.\n" + QA.format("is it?")], [" no", " yes"], 1),
    ("lambada_test_en.jsonl", {"text": "He ate the  bread"}, ["He ate the "], [" bread"], 0),
    ("docs.jsonl", {"text": "He ate the bread"}, [""], ["He ate the bread"], 0),
    ("winogrande.jsonl", {"sentence": "A _ or _ .", "option1": "b", "option2": "c", "answer": "2"},
     ["A b", "A c"], [" or _ ."] * 2, 1),
    ("jeopardy.jsonl", {"context": " Who? ", "continuation": "Ada"}, ["Who?\nAnswer: "], ["Ada"], 0),
    ("arc.jsonl", {"query": "Why?", "choices": ["a", "b"], "gold": 1}, ["Why?\nAnswer: "], ["a", "b"], 1),
    ("hellaswag.jsonl",
     {"activity_label": "Making tea", "ctx_a": "A woman [title] boils water.", "ctx_b": "SHE then",
      "ctx": "unused", "endings": ["pours it  into a cup.", "[step] flies away."], "label": "0"},
     ["Making tea: A woman. boils water. She then"], [" pours it into a cup.", "  flies away."], 0),
    ("hellaswag.jsonl", {"ctx": "The dog sees a cat and", "endings": ["barks loudly.", "reads."], "label": 1},
     ["The dog sees a cat and"], [" barks loudly.", " reads."], 1),
    ("arc_easy.jsonl", {"question": "What do plants need?", "answerKey": "2",
     "choices": {"text": ["Sand", "Light from the sun", "Iron"], "label": ["1", "2", "3"]}},
     [QA.format("What do plants need?")], [" Sand", " Light from the sun", " Iron"], 1),
    ("arc_easy.jsonl", {**FLAT, "answerKey": "A"}, [QA.format("Why?")], [" a", " b"], 0),
    ("piqa.jsonl", {"goal": "Open a jar.", "sol1": "Turn the lid.", "sol2": "Été: wait for it.", "label": 0},
     [QA.format("Open a jar.")], [" Turn the lid.", " Été: wait for it."], 0),
    ("openbookqa.jsonl", {"question_stem": "The sun is a", "choices": FLAT["choices"], "answerKey": "B"},
     ["The sun is a"], [" a", " b"], 1),
    ("boolq.jsonl", {"passage": "Snow is white.", "question": "is snow white", "label": 1},
     ["Snow is white.\n" + QA.format("is snow white?")], [" no", " yes"], 1),
    ("winogrande.jsonl", {"sentence": "The cup fell as _ was wet.", "option1": "the cup", "option2": "a cow",
     "answer": "1"}, ["The cup fell as the cup", "The cup fell as a cow"], [" was wet."] * 2, 0),
]  # fmt: skip
HARNESS = ("hellaswag", "arc_easy", "piqa", "openbookqa", "winogrande", "boolq")


def evaluate(folder: Path, model: Path, lines: Sequence[Any], *flags: str) -> tuple[dict[str, Any], str]:
    (folder / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (str(model), "--task", "task.jsonl", *flags, "--json", "x.json")
    status, printed, errors = run_job(1, ["-m", "zero_mpi", "evaluate", *flags], cwd=folder, timeout=200)
    assert (status, errors) == (0, ""), errors
    return json.loads((folder / "x.json").read_text())["models"][0]["choices"], printed


class Harness:
    """Rules of lm-evaluation-harness."""

    def __init__(self, path: Path) -> None:
        self.model, tokenizer = TextModel(path), tokenizer_of(path)
        self.first = [tokenizer.bos] if tokenizer.add_bos else []
        self.bos, self.encode = tokenizer.bos, lambda text: tokenizer.encode(text, special=True).tolist()

    def span(self, before: Sequence[int], ids: Sequence[int]) -> float:
        return -surprises(self.model, [*before, *ids])[len(before) - 1 :].sum()

    def log_likelihood(self, context: str, continuation: str) -> float:
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        before = self.first + self.encode(context)
        tokens = self.first + self.encode(context + continuation)
        return self.span(before or [self.bos], tokens[len(before) :])

    def rolling(self, text: str, limit: int) -> float:
        """Return a text's log-likelihood in the windows of get_rolling_token_windows with context_len 1."""
        tokens = self.first + self.encode(text)
        total = self.span([self.bos], tokens[:limit])
        done = min(limit, len(tokens))
        while done < len(tokens):
            new = min(len(tokens) - done, limit)
            end = done + new
            total += self.span(tokens[end - limit - 1 : end - new], tokens[end - new : end])
            done = end
        return total


def tokenizer_of(path: Path) -> Any:
    from zero_mpi.checkpoint.gguf.reader import GGUFFile

    return tokenizer_from_metadata(GGUFFile.open(path).metadata)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = sentencepiece_files.merged(600)
    config = replace(TINY, vocab_size=len(keys["tokenizer.ggml.tokens"]), context_length=96)
    return write_model(tmp_path_factory.mktemp("small") / "small.gguf", config, keys)


@needs_mpiexec
@pytest.mark.timeout_seconds(300)
@pytest.mark.parametrize(("which", "name"), [("SmolLM2", HARNESS[0]), *(("small", one) for one in HARNESS)])
def test_shares_and_log_likelihoods_are_lm_evals(small, tmp_path, which, name):
    path = small if which == "small" else Path(smollm2())
    questions = [question for file, *question in PUBLISHED if file == f"{name}.jsonl"]
    figures, printed = evaluate(tmp_path, path, [line for line, *_ in questions])
    harness, norms = (
        Harness(path),
        {"acc": lambda text: 1, "acc_norm": len, "acc_bytes": lambda t: len(t.encode())},
    )
    hits = dict.fromkeys(norms, 0)
    for (_, contexts, answers, right), actual in zip(questions, figures["log_likelihoods"], strict=True):
        pairs = zip(contexts * (len(answers) // len(contexts)), answers, strict=True)
        expected = [harness.log_likelihood(*pair) for pair in pairs]
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
        for figure, size in norms.items():
            hits[figure] += (
                int(np.argmax([ll / size(t[1:]) for ll, t in zip(expected, answers, strict=True)])) == right
            )
    for figure, count in hits.items():
        assert figures[figure] == count / len(questions)
        assert f" {figures[figure]:.4f}" in printed


@pytest.mark.parametrize(
    ("name", "line", "contexts", "answers", "right"), PUBLISHED, ids=lambda x: str(x)[:20]
)
def test_forms_are_those_of_the_data_sets(tmp_path, name, line, contexts, answers, right):
    (tmp_path / name).write_text(json.dumps(line))
    (question,) = with_shots(read_choices(tmp_path / name, "\nAnswer: "), 0)
    assert [[*question.contexts], [*question.answers], question.right] == [contexts, answers, right]


def test_solved_questions_stand_between_subject_and_question(tmp_path):
    lines = [{**FLAT, "choices": ["a", "b"], "subject": "us_history", "answer": n} for n in (0, 1)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    questions = with_shots(read_choices(tmp_path / "m.jsonl"), 1)
    assert [each.contexts for each in questions] == [[f"{ABOUT}{LISTED} {x}\n\n{LISTED}"] for x in "BA"]


def test_the_delimiter_is_of_the_question(tmp_path):
    """The delimiter belongs to the question: as in CORE, only the text after `prompt.strip()` counts."""
    (tmp_path / "q.jsonl").write_text(json.dumps({"context": "Who?", "continuation": "Ada"}))
    choices = encode_choices(tmp_path / "q.jsonl", ByteTokenizer(), 64, delimiter="\nAnswer: ")
    assert bytes(choices.sequences[0][1:].tolist()) == b"Who?\nAnswer: Ada"
    assert choices.tokens == [4]
    assert read_task(["m", "--task", "q", "--delimiter", r"\nAnswer: "]).delimiter == "\nAnswer: "
    with pytest.raises(UsageError, match="--delimiter"):
        read_task(["m", "--data", "t", "--delimiter", "x"])


TEXTS = ["The lazy dog jumps  over the fox. " * 12, "Une école d'été\n\nand more.", "a"]


@needs_mpiexec
@pytest.mark.parametrize("which", ["small", "SmolLM2"])
def test_rolling_perplexity_is_lm_evals(small, tmp_path, which):
    path, texts = (small, TEXTS) if which == "small" else (Path(smollm2()), TEXTS[1:])
    figures, _ = evaluate(tmp_path, path, [{"text": text} for text in texts])
    harness, limit = Harness(path), 96 if which == "small" else 2048
    assert which != "small" or len(harness.encode(texts[0])) > 96, "several windows"
    totals = [harness.rolling(text, limit) for text in texts]
    np.testing.assert_allclose(
        [sum(parts) for parts in figures["log_likelihoods"]], totals, rtol=1e-4, atol=1e-4
    )
    words, nbytes = sum(len(text.split()) for text in texts) + 1, sum(len(text.encode()) for text in texts)
    words -= which != "small"  # only "small" has a text that ends in a space: lm-eval adds a word
    assert figures["word_perplexity"] == pytest.approx(math.exp(-sum(totals) / words), rel=1e-4)
    assert figures["byte_perplexity"] == pytest.approx(math.exp(-sum(totals) / nbytes), rel=1e-4)
    assert figures["bits_per_byte"] == pytest.approx(-sum(totals) / nbytes / math.log(2), rel=1e-4)


@pytest.mark.parametrize("bos", [None, 256])
def test_an_empty_text_is_a_word_as_in_lm_eval(bos, tmp_path):
    texts = ["", "ab cd " * 9, "", "a"]
    (tmp_path / "q").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    choices = encode_choices(tmp_path / "q", ByteTokenizer(), 16, bos)
    figures = choice_figures(np.ones(len(choices.sequences)), choices)
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    assert figures["word_perplexity"] == pytest.approx(math.exp(len(choices.sequences) / words))
    assert sum(choices.nbytes) == sum(map(len, texts))
    assert len(choices.nbytes) == sum(choices.counts)


CORE = {
    "multiple choice": [
        {"query": f"The {name} is", "choices": ["a dog", "the sun", "a dog indeed"], "gold": gold}
        for name, gold in [("fox", 0), ("star", 1), ("hound", 2), ("moon", 1)]
    ],
    "schema": [
        {
            "context_options": [f"The cup fell as {a}", f"The cup fell as {b}"],
            "continuation": "was wet.",
            "gold": gold,
        }
        for a, b, gold in [("it", "the sun", 0), ("a dog", "he", 1), ("they", "the cup", 1)]
    ],
    "language modeling": [
        {"context": f"  The lazy dog jumps {place} ", "continuation": what}
        for place, what in [("over", "the fox"), ("under", "a"), ("to", "the"), ("in", "it")]
    ],
}


def core(harness: Harness, items: list[Any], kind: str, shots: int) -> tuple[float, list[list[float]]]:
    """Return accuracy and log-likelihoods by the rules of nanochat/core_eval.py."""
    order = list(range(len(items)))
    random.Random(1337).shuffle(order)
    hits, nats = 0, dict[int, list[float]]()
    for number, place in enumerate(order):
        others = [i for i in range(len(order)) if i != number]
        numbers = random.Random(1234 + number).sample(others, shots) if shots else []
        item, solved = items[place], [items[order[i]] for i in numbers]
        if kind == "multiple choice":
            front = "".join(f"{s['query']} {s['choices'][s['gold']]}\n\n" for s in solved)
            prompts = [f"{front}{item['query']} {choice}" for choice in item["choices"]]
        elif kind == "schema":
            front = "".join(f"{s['context_options'][s['gold']]} {s['continuation']}\n\n" for s in solved)
            prompts = [f"{front}{context} {item['continuation']}" for context in item["context_options"]]
        else:
            front = "".join(f"{s['context'].strip()} {s['continuation']}\n\n" for s in solved)
            question = f"{front}{item['context'].strip()}"
            prompts = [question, f"{question} {item['continuation']}"]
        rows = [[harness.bos, *harness.encode(prompt)] for prompt in prompts]
        if kind == "language modeling":
            before, row = rows
            assert row[: len(before)] == before
            harness.model.reset()
            likeliest = harness.model.logits(row[:-1]).argmax(-1)[len(before) - 1 :]
            hits += likeliest.tolist() == row[len(before) :]
            nats[place] = [harness.span(before, row[len(before) :])]
            continue
        ends = rows if kind == "multiple choice" else [row[::-1] for row in rows]
        length = next(i for i in range(999) if len({row[i] if i < len(row) else -i for row in ends}) > 1)
        starts = [length if kind == "multiple choice" else len(row) - length for row in rows]
        scores = [harness.span(row[:start], row[start:]) for row, start in zip(rows, starts, strict=True)]
        means = [ll / (len(row) - start) for ll, row, start in zip(scores, rows, starts, strict=True)]
        hits += int(np.argmax(means)) == item["gold"]
        nats[place] = scores
    return hits / len(items), [nats[place] for place in range(len(items))]


@needs_mpiexec
@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("kind", CORE)
def test_core_is_nanochats(small, tmp_path, kind, shots):
    figures, _ = evaluate(tmp_path, small, CORE[kind], "--shots", str(shots))
    share, nats = core(Harness(small), CORE[kind], kind, shots)
    assert figures["acc"] == share
    for actual, expected in zip(figures["log_likelihoods"], nats, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@needs_mpiexec
def test_the_likeliest_continuation_is_right(small, tmp_path):
    """One answer is the model's likeliest next word, the other is not."""
    harness, tokens = Harness(small), tokenizer_of(small).tokens
    words = [token[1:] for token in tokens if token.startswith("▁") and token[1:].isalpha()]
    for context in (*words, *map(" ".join, product(words, words))):
        harness.model.reset()
        ids = [harness.bos, *harness.encode(context)]
        best = int(harness.model.logits(ids)[-1].argmax())
        word = tokens[best].removeprefix("▁")
        if word.isalpha() and harness.encode(f"{context} {word}") == [*ids[1:], best]:
            break
    else:
        pytest.fail("no context continues with a word")
    figures, _ = evaluate(tmp_path, small, [{"context": context, "continuation": x} for x in (word, "zq")])
    assert figures["acc"] == 0.5


# Question and answer are encoded as one text.


@pytest.mark.parametrize(
    ("tokenizer", "bos"),
    [(tokenizer_from_metadata(sentencepiece_files.merged(600)), 1), (ByteTokenizer(), None)],
    ids=["SentencePiece", "bytes"],
)
def test_question_and_answer_are_encoded_as_one_text(tmp_path, tokenizer, bos):
    lines = [
        {"question": "Two and two are", "answers": [" four", " five"], "right": 0},
        {"question": "Two and two are ", "answers": ["four", "five"], "right": 0},
        {"question": "pre", "answers": ["dict", "fix"], "right": 1},
        {"question": "", "answers": ["a", "bc"], "right": 1},
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    choices, place, front = encode_choices(path, tokenizer, 64, bos), 0, [] if bos is None else [bos]
    for line in lines:
        for answer in line["answers"]:
            tokens = [*front, *tokenizer.encode(line["question"] + answer).tolist()]
            prompt = [*front, *tokenizer.encode(line["question"].rstrip()).tolist()]
            ids, start = choices.sequences[place].tolist(), choices.starts[place]
            if line["question"] or bos:
                assert ids == tokens
                assert tokens[:start] == prompt[:start]
                assert start == len(prompt) or tokens[start] != prompt[start]
            else:
                assert (ids, start) == ([256, *tokens], 1)
            place += 1
    assert choices.tokens[0:2] == choices.tokens[2:4]


def test_lines_of_two_forms_and_too_many_shots_are_refused(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "a"}\n{"context": "b", "continuation": "c"}')
    with pytest.raises(FileError, match="line 2"):
        encode_choices(path, ByteTokenizer(), 8)
    for shots in (2, -1):
        with pytest.raises(UsageError, match=f"--shots {shots}"):
            encode_choices(path, ByteTokenizer(), 8, None, shots)
