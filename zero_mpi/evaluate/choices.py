"""Questions with several answers, of which one is right: a file of JSON lines, and its tokens.

A line is an object with a text `question` (or `context`), a list of texts `answers` and `right`, the number
of the right one, from 0. The answer follows the question as they stand there: who wants a space between them
begins the answer with it. Each is encoded by itself, so the tokens that count are those of the answer alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data import Tokenizer
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import quoted, show, shown
from zero_mpi.files.json_lines import each_line, is_text

Ids = NDArray[np.unsignedinteger[Any]]
MOST_ANSWERS = 1000  # of a question
QUESTION = ("question", "context")  # names of what an answer follows: one of them
EXPECTED = 'expected an object such as {"question": "...", "answers": ["...", "..."], "right": 0}'


@dataclass(frozen=True)
class EncodedChoices:
    """Questions as tokens.

    sequences   for each answer of each question the ids of the question, which its answers share, and its own
    counts      answers of each question
    right       number of the right one of each
    nbytes      of each answer, in UTF-8
    """

    sequences: list[tuple[Ids, Ids]]
    counts: list[int]
    right: list[int]
    nbytes: list[int]

    @property
    def tokens(self) -> list[int]:
        """How many tokens each answer has."""
        return [len(answer) for _, answer in self.sequences]


def encode_choices(path: Path, tokenizer: Tokenizer, context: int) -> EncodedChoices:
    """Return the questions of a file as tokens.

    What a model asks for before a text (bos) stands before a question, in which control tokens count as such.
    Raises FileError that names file, line, what was expected and what came.
    """
    found = EncodedChoices([], [], [], [])

    def encode(line: int, value: Any) -> None:
        text, answers, right = one_choice(value)
        question = tokenizer.encode_prompt(text)
        for answer, ids in zip(answers, tokenizer.encode_batch(answers), strict=True):
            length = len(question) + len(ids)
            if not len(ids) or length > context + 1:
                raise ValueError(
                    f"question and answer {show(answer, 40)} are {length} tokens, the answer {len(ids)}; "
                    f"expected at least one of the answer and at most {context + 1} together, by the context"
                )
            found.sequences.append((question, ids))
            found.nbytes.append(len(answer.encode()))
        found.counts.append(len(answers))
        found.right.append(right)

    if not list(each_line(path, "--choices", encode)):
        raise FileError(f"--choices {shown(path)}: {EXPECTED} in each line, found no line")
    return found


def one_choice(value: Any) -> tuple[str, list[str], int]:
    """Return question, answers and the number of the right one; raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{EXPECTED}, found {quoted(value)}")
    names = [name for name in QUESTION if name in value]
    if len(names) != 1:
        has = " and ".join(names) or ", ".join(map(show, list(value)[:5])) or "nothing"
        raise ValueError(f"{EXPECTED}, with one of question and context, found {has}")
    question, answers, right = value[names[0]], value.get("answers"), value.get("right")
    if not is_text(question):
        raise ValueError(f"{names[0]}: expected a text, found {quoted(question)}")
    if not isinstance(answers, list) or not 2 <= len(answers) <= MOST_ANSWERS:
        found = len(answers) if isinstance(answers, list) else quoted(answers)
        raise ValueError(f"answers: expected a list of 2 to {MOST_ANSWERS} texts, found {found}")
    for answer in answers:
        if not is_text(answer) or not answer:
            raise ValueError(f"answers: expected texts that are not empty, found {quoted(answer)}")
    if not isinstance(right, int) or isinstance(right, bool) or not 0 <= right < len(answers):
        raise ValueError(
            f"right: expected the number of an answer, 0 to {len(answers) - 1}, found {quoted(right)}"
        )
    return question, answers, right
