"""Lines of task files as they are published, as questions: prompts of lm-evaluation-harness and of CORE."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import quoted
from zero_mpi.files.json_lines import is_text

# What counts: the answers; of CORE what begins where prompts differ, what they have in common at their ends,
# or an answer of which each token has to be the likeliest; all of a text.
ANSWERS, DIFFERING, COMMON, GREEDY, TEXT = "answers", "differing", "common", "greedy", "text"
CORE = (DIFFERING, COMMON, GREEDY)
QA = "Question: {}\nAnswer:"


class Question(NamedTuple):
    """Answers, the contexts that they follow (one, or one for each), and the number of the right answer."""

    contexts: Sequence[str]
    answers: Sequence[str]
    right: int
    span: str = ANSWERS
    line: int = 0


def spaced(contexts: Sequence[str], answers: Sequence[str], right: Any, span: str = ANSWERS) -> Question:
    """A question whose answers follow a space."""
    return Question(contexts, [" " + answer for answer in answers], int(right), span)


def hellaswag(v: Any) -> Question:
    """A line of HellaSwag, without the marks of WikiHow."""
    text = f"{v['ctx_a']} {v['ctx_b'].capitalize()}" if "ctx_a" in v else v["ctx"]
    texts = [f"{v['activity_label']}: {text}" if "activity_label" in v else text, *v["endings"]]
    texts = [re.sub(r"\[.*?\]", "", t.strip().replace(" [title]", ". ")).replace("  ", " ") for t in texts]
    return spaced(texts[:1], texts[1:], v["label"])


def labelled(context: str, v: Any) -> Question:
    """A question whose answers have labels, as ARC's."""
    return spaced([context], v["choices"]["text"], v["choices"]["label"].index(v["answerKey"]))


def winogrande(v: Any) -> Question:
    """One end of a sentence behind two beginnings."""
    before, after = v["sentence"].split("_")
    return spaced([before + v["option1"], before + v["option2"]], [after.strip()] * 2, int(v["answer"]) - 1)


FORMS: dict[str, Callable[[Any], Question]] = {  # by the fields of a line
    "ctx endings label": hellaswag,
    "question_stem choices answerKey": lambda v: labelled(v["question_stem"], v),
    "question choices answerKey": lambda v: labelled(QA.format(v["question"]), v),
    "goal sol1 sol2 label": lambda v: spaced([QA.format(v["goal"])], [v["sol1"], v["sol2"]], v["label"]),
    "passage question label": lambda v: spaced(
        [f"{v['passage']}\n" + QA.format(v["question"] + "?")], ["no", "yes"], v["label"]
    ),
    "sentence option1 option2 answer": winogrande,
    "query choices gold": lambda v: spaced([v["query"]], v["choices"], v["gold"], DIFFERING),
    "context_options continuation gold": lambda v: spaced(
        v["context_options"], [v["continuation"]] * len(v["context_options"]), v["gold"], COMMON
    ),
    "context continuation": lambda v: spaced([v["context"].strip()], [v["continuation"]], 0, GREEDY),
    "text": lambda v: Question([""], [v["text"]], 0, TEXT),
}


def published(line: int, value: dict[str, Any]) -> Question | None:
    """The question of a line in a published form, None for others; raises ValueError for damaged fields."""
    fields = next((each for each in FORMS if value.keys() >= {*each.split()}), None)
    if fields is None:
        return None
    try:
        found = FORMS[fields](value)._replace(line=line)
        if all(map(is_text, [*found.contexts, *found.answers])) and found.right in range(len(found.answers)):
            return found
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"expected {fields.replace(' ', ', ')} as they are published, found {quoted(value)}")


def with_shots(questions: Sequence[Question], shots: int) -> list[Question]:
    """Questions behind `shots` others of the file and their right answers, drawn as CORE draws them."""
    if not 0 <= shots < max(1, len(questions)):
        raise UsageError(f"--shots {shots}: expected fewer than the {len(questions)} questions of the file")
    order, found = [*range(len(questions))], [*questions]
    shots_of = [f"{q.contexts[q.right % len(q.contexts)]}{q.answers[q.right]}\n\n" for q in questions]
    Random(1337).shuffle(order)
    for number, place in enumerate(order):
        drawn = Random(1234 + number).sample(range(len(order) - 1), shots)
        front = "".join(shots_of[order[other + (other >= number)]] for other in drawn)
        found[place] = found[place]._replace(contexts=[front + each for each in found[place].contexts])
    return found
