"""Lines of task files as they are published, as questions: prompts of lm-evaluation-harness and of CORE."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted
from zero_mpi.files.text_streams import is_text

# Scored: the answers; a last word, each token of which must be the most likely; all of a text. For CORE
# what begins where prompts differ, what they have in common at their ends, or a continuation as a last word.
ANSWERS, LAST, TEXT = "answers", "last", "text"
DIFFERING, COMMON, GREEDY = CORE = ("differing", "common", "greedy")
MANY = {"choices", "context_options", "endings"}  # fields with several texts
LETTERS = "ABCDEFGHIJ"
ABOUT = "The following are multiple choice questions (with answers) about "
BY_NAME = "lambada"  # part of the name of a file whose lines are texts with a last word to predict


class Question(NamedTuple):
    """Question: answers, the contexts that they follow (one, or one for each), number of the right answer.

    `front` comes before all, solved questions too.
    """

    contexts: Sequence[str]
    answers: Sequence[str]
    right: int
    span: str = ANSWERS
    front: str = ""
    line: int = 0


def asked(question: str, before: str = "") -> str:
    """Return the prompt of most data sets."""
    return before + "Question: " + question + "\nAnswer:"


def hellaswag(v: Any) -> Question:
    """Return a line of HellaSwag, without the marks of WikiHow."""
    text = f"{v['ctx_a']} {v['ctx_b'].capitalize()}" if "ctx_a" in v else v["ctx"]
    texts = [f"{v['activity_label']}: {text}" if "activity_label" in v else text, *v["endings"]]
    texts = [re.sub(r"\[.*?\]", "", t.strip().replace(" [title]", ". ")).replace("  ", " ") for t in texts]
    return Question(texts[:1], texts[1:], v["label"])


def labelled(context: str, v: Any) -> Question:
    """Return a question whose answers have labels, as in ARC."""
    return Question([context], v["choices"]["text"], v["choices"]["label"].index(v["answerKey"].strip()))


def lettered(question: str, answers: Sequence[str], right: int, front: str = "") -> Question:
    """Return a question that lists its answers and asks for the letter of the right one."""
    listed = ["\n" + letter + ". " + text for letter, text in zip(LETTERS, answers, strict=False)]
    return Question(["".join([question, *listed, "\nAnswer:"])], LETTERS[: len(answers)], right, front=front)


def mmlu(v: Any) -> Question:
    """Return the question of a line of MMLU, after its subject."""
    front = ABOUT + v["subject"].replace("_", " ") + ".\n\n" if "subject" in v else ""
    return lettered(v["question"].strip(), v["choices"], v["answer"], front)


def boolq(v: Any) -> Question:
    """Return the question of a line of BoolQ, in its own form or SuperGLUE's."""
    context = asked(v["question"] + "?", v["passage"] + "\n")
    return Question([context], ["no", "yes"], v["label" if "label" in v else "answer"])


def winogrande(v: Any) -> Question:
    """Return a question with one end of a sentence and two beginnings."""
    before, after = v["sentence"].split("_", 1)
    return Question([before + v["option1"], before + v["option2"]], [after.strip()] * 2, int(v["answer"]) - 1)


def lambada(v: Any) -> Question:
    """Return a question for the last word of a text."""
    before, _, last = v["text"].rpartition(" ")
    return Question([before], [last], 0, LAST)


FORMS: dict[str, Callable[[Any], Question]] = {  # by the fields of a line; the first match is used
    "ctx endings label": hellaswag,
    "question_stem choices answerKey": lambda v: labelled(v["question_stem"], v),
    "question question_concept choices answerKey": lambda v: lettered(
        "Question: " + v["question"].strip(), v["choices"]["text"], labelled("", v).right
    ),
    "question choices answerKey": lambda v: labelled(asked(v["question"]), v),
    "question choices answer": mmlu,
    "question support distractor1 distractor2 distractor3 correct_answer": lambda v: Question(
        [asked(v["question"], v["support"].lstrip() + "\n")],
        [*(v[f"distractor{number}"] for number in (1, 2, 3)), v["correct_answer"]],
        3,
    ),
    "goal sol1 sol2 label": lambda v: Question([asked(v["goal"])], [v["sol1"], v["sol2"]], v["label"]),
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
    """Return a line in AI2's form, with answers inside the question, in the fields of its data sets."""
    inside = value.get("question")
    if not isinstance(inside, dict) or not isinstance(inside.get("choices"), list):
        return value
    table = {
        name: [each.get(name) for each in inside["choices"] if isinstance(each, dict)]
        for name in ("text", "label")
    }
    book = re.fullmatch(r"\d+-\d+", str(value.get("id")))  # so OpenBookQA numbers its questions, ARC does not
    stem = {"question_stem" if book else "question": inside.get("stem")}
    return {**{k: v for k, v in value.items() if k != "question"}, **inside, **stem, "choices": table}


def published(line: int, value: dict[str, Any], name: str = "", delimiter: str = " ") -> Question | None:
    """Return the question of a line in a published form, else None; raises ValueError for damaged fields.

    `name` of the file tells what fields do not; `delimiter` is between question and answer of CORE.
    """
    has = {*value, f"({BY_NAME})"} if BY_NAME in name.lower() else {*value}
    fields = next((each for each in FORMS if has.issuperset(each.split())), None)
    if fields is None:
        return None
    try:
        made = FORMS[fields](value)
        contexts, answers, right = made.contexts, made.answers, int(made.right)
        many = all(isinstance(value[each], list | dict) for each in MANY & value.keys())
        if many and all(map(is_text, [*contexts, *answers])) and right in range(len(answers)):
            if made.span in CORE:
                contexts = [each + delimiter for each in contexts]
            elif made.span != TEXT:
                answers = [" " + each for each in answers]
            return made._replace(contexts=contexts, answers=answers, right=right, line=line)
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"expected {fields.replace(' ', ', ')} as they are published, found {quoted(value)}")


def with_shots(questions: Sequence[Question], shots: int) -> list[Question]:
    """Return questions after `shots` others of the file and their right answers, drawn as CORE does."""
    if not 0 <= shots < max(1, len(questions)):
        raise UsageError(f"--shots {shots}: expected fewer than the {len(questions)} questions of the file")
    order, found = [*range(len(questions))], [*questions]
    shots_of = [f"{q.contexts[q.right % len(q.contexts)]}{q.answers[q.right]}\n\n" for q in questions]
    Random(1337).shuffle(order)
    for number, place in enumerate(order):
        drawn = Random(1234 + number).sample(range(len(order) - 1), shots)
        front = "".join(shots_of[order[other + (other >= number)]] for other in drawn)
        front = found[place].front + front
        found[place] = found[place]._replace(contexts=[front + each for each in found[place].contexts])
    return found
