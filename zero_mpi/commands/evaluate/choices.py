"""Reads multiple-choice questions from a file of JSON lines and encodes them as tokens.

A line is an object with a text `question` (or `context`), a list of texts `answers`, and `right`, the number
of the right answer, counted from 0; or it has a published form (`FORMS`). The answer directly follows the
question, and they are encoded as one text. White space between them is part of the answer.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data import Tokenizer
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.text_streams import each_line, is_text

# Tokens of a question that are scored: its answers, the last word of a text, or the full text; in CORE the
# tokens after the common beginning of all prompts, their common ending, or a continuation.
ANSWERS, LAST, TEXT = "answers", "last", "text"
DIFFERING, COMMON, GREEDY = CORE = ("differing", "common", "greedy")
MANY = {"choices", "context_options", "endings"}  # fields with several texts
LETTERS = "ABCDEFGHIJ"
ABOUT = "The following are multiple choice questions (with answers) about "
BY_NAME = "lambada"  # a file with this in its name has texts whose last word is to be predicted


class Question(NamedTuple):
    """Question: contexts (one for all answers or one per answer), answers, and the index of the right answer.

    `front` comes before the context, and also before any solved questions.
    """

    contexts: Sequence[str]
    answers: Sequence[str]
    right: int
    span: str = ANSWERS
    front: str = ""
    line: int = 0


def prompt_of(question: str, passage: str = "") -> str:
    """Return the prompt for a question in the form that most data sets use."""
    return passage + "Question: " + question + "\nAnswer:"


def hellaswag(v: Any) -> Question:
    """Return the question in a line of HellaSwag, without the markup of WikiHow."""
    text = f"{v['ctx_a']} {v['ctx_b'].capitalize()}" if "ctx_a" in v else v["ctx"]
    texts = [f"{v['activity_label']}: {text}" if "activity_label" in v else text, *v["endings"]]
    texts = [re.sub(r"\[.*?\]", "", t.strip().replace(" [title]", ". ")).replace("  ", " ") for t in texts]
    return Question(texts[:1], texts[1:], v["label"])


def labelled_question(context: str, v: Any) -> Question:
    """Return a question whose answers have labels, as in ARC."""
    return Question([context], v["choices"]["text"], v["choices"]["label"].index(v["answerKey"].strip()))


def lettered_question(question: str, answers: Sequence[str], right: int, front: str = "") -> Question:
    lines = ["\n" + letter + ". " + text for letter, text in zip(LETTERS, answers, strict=False)]
    return Question(["".join([question, *lines, "\nAnswer:"])], LETTERS[: len(answers)], right, front=front)


def mmlu(v: Any) -> Question:
    front = ABOUT + v["subject"].replace("_", " ") + ".\n\n" if "subject" in v else ""
    return lettered_question(v["question"].strip(), v["choices"], v["answer"], front)


def boolq(v: Any) -> Question:
    """Return the question in a line of BoolQ, in the original form or in that of SuperGLUE."""
    context = prompt_of(v["question"] + "?", v["passage"] + "\n")
    return Question([context], ["no", "yes"], v["label" if "label" in v else "answer"])


def winogrande(v: Any) -> Question:
    """Return a question with two beginnings of a sentence; both have its end as the answer."""
    before, after = v["sentence"].split("_", 1)
    return Question([before + v["option1"], before + v["option2"]], [after.strip()] * 2, int(v["answer"]) - 1)


def lambada(v: Any) -> Question:
    context, _, word = v["text"].rpartition(" ")
    return Question([context], [word], 0, LAST)


FORMS: dict[str, Callable[[Any], Question]] = {  # fields of a line -> function; the first match is used
    "ctx endings label": hellaswag,
    "question_stem choices answerKey": lambda v: labelled_question(v["question_stem"], v),
    "question question_concept choices answerKey": lambda v: lettered_question(
        "Question: " + v["question"].strip(), v["choices"]["text"], labelled_question("", v).right
    ),
    "question choices answerKey": lambda v: labelled_question(prompt_of(v["question"]), v),
    "question choices answer": mmlu,
    "question support distractor1 distractor2 distractor3 correct_answer": lambda v: Question(
        [prompt_of(v["question"], v["support"].lstrip() + "\n")],
        [*(v[f"distractor{number}"] for number in (1, 2, 3)), v["correct_answer"]],
        3,
    ),
    "goal sol1 sol2 label": lambda v: Question([prompt_of(v["goal"])], [v["sol1"], v["sol2"]], v["label"]),
    "passage question label": boolq,
    "passage question answer": boolq,
    "sentence option1 option2 answer": winogrande,
    "query choices gold": lambda v: Question([v["query"]], v["choices"], v["gold"], DIFFERING),
    "context_options continuation gold": lambda v: Question(
        v["context_options"], [v["continuation"]] * len(v["context_options"]), v["gold"], COMMON
    ),
    "context continuation": lambda v: Question([v["context"].strip()], [v["continuation"]], 0, GREEDY),
    f"({BY_NAME}) text": lambada,
    "text": lambda v: Question([""], [v["text"]], 0, TEXT),
}


def flat(value: dict[str, Any]) -> dict[str, Any]:
    """Flatten the nested answers of a line in AI2's own files; return any other line unchanged."""
    question = value.get("question")
    if not isinstance(question, dict) or not isinstance(question.get("choices"), list):
        return value
    table = {
        name: [choice.get(name) for choice in question["choices"] if isinstance(choice, dict)]
        for name in ("text", "label")
    }
    book = re.fullmatch(r"\d+-\d+", str(value.get("id")))  # OpenBookQA's ids differ from those of ARC
    stem = {"question_stem" if book else "question": question.get("stem")}
    return {**{k: v for k, v in value.items() if k != "question"}, **question, **stem, "choices": table}


def published_form(line: int, value: dict[str, Any], name: str = "", delimiter: str = " ") -> Question | None:
    """Return the question of a line in a published form, else None. Raise ValueError for invalid fields.

    If the fields fit several forms, the file's `name` decides. `delimiter` precedes answers in CORE.
    """
    names = {*value, f"({BY_NAME})"} if BY_NAME in name.lower() else {*value}
    fields = next((each for each in FORMS if names.issuperset(each.split())), None)
    if fields is None:
        return None
    try:
        question = FORMS[fields](value)
        contexts, answers, right = question.contexts, question.answers, int(question.right)
        are_lists = all(isinstance(value[each], list | dict) for each in MANY & value.keys())
        if are_lists and all(map(is_text, [*contexts, *answers])) and right in range(len(answers)):
            if question.span in CORE:
                contexts = [each + delimiter for each in contexts]
            elif question.span != TEXT:
                answers = [" " + each for each in answers]
            return question._replace(contexts=contexts, answers=answers, right=right, line=line)
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"expected {fields.replace(' ', ', ')} as they are published, found {quoted(value)}")


def with_shots(questions: Sequence[Question], shots: int) -> list[Question]:
    """Return the questions, each after `shots` solved questions drawn from the file, as in CORE."""
    if not 0 <= shots < max(1, len(questions)):
        raise UsageError(f"--shots {shots}: expected fewer than the {len(questions)} questions of the file")
    solved = [f"{q.contexts[q.right % len(q.contexts)]}{q.answers[q.right]}\n\n" for q in questions]
    order, fronts = [*range(len(questions))], dict[int, str]()
    Random(1337).shuffle(order)
    for number, place in enumerate(order):
        sample = Random(1234 + number).sample(range(len(order) - 1), shots)  # the question itself is skipped
        fronts[place] = "".join(solved[order[other + (other >= number)]] for other in sample)
    return [
        question._replace(contexts=[question.front + fronts[place] + each for each in question.contexts])
        for place, question in enumerate(questions)
    ]


Ids = NDArray[np.int64]
MOST_ANSWERS, MOST_LETTERS = 1000, 1 << 22  # maximum number of answers; of characters, contexts included
QUESTION = ("question", "context")  # names of the field that comes before an answer
EXPECTED = 'expected an object such as {"question": "...", "answers": ["...", "..."], "right": 0}'


@dataclass
class EncodedChoices:
    """Questions encoded as sequences of tokens."""

    # One array of ids for each answer of each question, or for each window of a text.
    sequences: list[Ids] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # index of the first scored token of each sequence
    counts: list[int] = field(default_factory=list)  # number of sequences of each question
    right: list[int] = field(default_factory=list)  # number of the right answer of each question
    answers: list[str] = field(default_factory=list)  # "" for a text's windows after the first
    span: str = ANSWERS  # name of the tokens that are scored, such as ANSWERS
    cut: int = 0  # number of sequences whose beginning was cut off to fit the context

    @property
    def tokens(self) -> list[int]:
        return [len(ids) - start for ids, start in zip(self.sequences, self.starts, strict=True)]

    @property
    def nbytes(self) -> list[int]:
        return [len(answer.encode()) for answer in self.answers]


def read_choices(path: Path, delimiter: str = " ") -> list[Question]:
    """Return the questions in a file. Raise FileError that names an invalid line and its fault."""
    questions = list(each_line(path, "--choices", partial(one_choice, path.name, delimiter)))
    if not questions:
        raise FileError(f"--choices {shown(path)}: {EXPECTED} in each line, found no line")
    return questions


def one_choice(name: str, delimiter: str, line: int, value: Any) -> Question:
    """Return the question in a line of the file `name`. Raise ValueError if the line has none."""
    if not isinstance(value, dict):
        raise ValueError(f"{EXPECTED}, found {quoted(value)}")
    value = flat(value)
    if (choice := published_form(line, value, name, delimiter)) is not None:
        return choice
    names = [name for name in QUESTION if name in value]
    if len(names) != 1:
        keys = " and ".join(names) or ", ".join(map(show, list(value)[:5])) or "nothing"
        raise ValueError(f"{EXPECTED}, with one of question and context, found {keys}")
    question, answers, right = value[names[0]], value.get("answers"), value.get("right")
    if not is_text(question):
        raise ValueError(f"{names[0]}: expected a text, found {quoted(question)}")
    if not isinstance(answers, list) or not 2 <= len(answers) <= MOST_ANSWERS:
        count = len(answers) if isinstance(answers, list) else quoted(answers)
        raise ValueError(f"answers: expected a list of 2 to {MOST_ANSWERS} texts, found {count}")
    for answer in answers:
        if not is_text(answer) or not answer:
            raise ValueError(f"answers: expected texts that are not empty, found {quoted(answer)}")
    if not isinstance(right, int) or isinstance(right, bool) or not 0 <= right < len(answers):
        raise ValueError(
            f"right: expected the number of an answer, 0 to {len(answers) - 1}, found {quoted(right)}"
        )
    return Question([question], answers, right, line=line)


def encode_choices(
    path: Path,
    tokenizer: Tokenizer,
    context: int,
    bos: int | None = None,
    shots: int = 0,
    delimiter: str = " ",
) -> EncodedChoices:
    """Return the questions in a file as tokens, with control tokens parsed. Long questions lose their start.

    `bos` comes before each question. Questions of CORE, or with a scored first token, begin with BOS or EOS.
    Raises FileError if an answer is longer than `context` positions or has no token, or all texts are empty.
    """
    questions = with_shots(read_choices(path, delimiter), shots)
    choices = EncodedChoices(span=questions[0].span)
    edge = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None][:1]
    for question in questions:
        place = f"--choices {shown(path)}, line {question.line}"
        if question.span != choices.span:
            raise FileError(f"{place}: expected the same form as in the first line")
        letters = sum(map(len, question.answers)) + len(question.answers) * max(map(len, question.contexts))
        if letters > MOST_LETTERS:
            raise FileError(f"{place}: {letters} characters of text, expected at most {MOST_LETTERS}")
        first = edge if question.span in CORE else [] if bos is None else [bos]
        rows = list(rows_of(question, tokenizer, first, edge, context))
        for ids, start in rows:
            excess = max(0, len(ids) - context - 1)
            if not 0 < start - excess < len(ids) - excess:
                problem = f"an answer has {len(ids) - start} of {len(ids)} tokens"
                raise FileError(f"{place}: {problem}, expected 1 to {context} (the model's context)")
            choices.sequences.append(ids[excess:])
            choices.starts.append(start - excess)
            choices.cut += excess > 0
        choices.answers += [*question.answers, *[""] * len(rows)][: len(rows)]
        choices.counts.append(len(rows))
        choices.right.append(question.right)
    if not choices.sequences:
        raise FileError(f"--choices {shown(path)}: expected a text with tokens to predict, found none")
    return choices


def rows_of(
    question: Question, tokenizer: Tokenizer, first: list[int], edge: list[int], context: int
) -> Iterator[tuple[Ids, int]]:
    """Yield each answer's ids (BOS or EOS, question, answer) and the index of its first scored id."""
    texts = [lead + answer for lead, answer in zip(cycle(question.contexts), question.answers, strict=False)]
    texts += [text.rstrip() for text in question.contexts]
    arrays = [np.asarray(ids, np.int64) for ids in tokenizer.encode_batch(texts, special=True)]
    arrays = [ids if ids[:1].tolist() == first else np.append(first, ids).astype(np.int64) for ids in arrays]
    rows, prompts = arrays[: len(question.answers)], arrays[len(question.answers) :]
    if question.span == TEXT:
        yield from windows_of(np.append(edge, rows[0]).astype(np.int64), context)
        return
    prefix = in_common(rows) if question.span == DIFFERING else 0
    suffix = in_common([ids[::-1] for ids in rows]) if question.span == COMMON else 0
    for ids, prompt in zip(rows, cycle(prompts), strict=False):
        start = prefix or (len(ids) - suffix if suffix else in_common([ids, prompt]))
        if not start and ids[:1].tolist() != edge:
            ids = np.append(edge, ids).astype(np.int64)
        yield ids, max(1, start)


def windows_of(ids: Ids, context: int) -> Iterator[tuple[Ids, int]]:
    """Yield overlapping windows, in each of which the ids from an index on are scored; all but the first."""
    for place in range(1, len(ids), context):
        end = min(place + context, len(ids))
        begin = max(0, end - context - 1)
        yield ids[begin:end], place - begin


def in_common(rows: Sequence[Ids]) -> int:
    """Return the length of the common beginning of all rows."""
    length = min(map(len, rows))
    equal = np.logical_and.reduce([row[:length] == rows[0][:length] for row in rows])
    return int(np.append(equal, False).argmin())
