"""The figures as a text: what is there to say of the text and the questions, and a row for each model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_mpi.cli.text import plural
from zero_mpi.commands.evaluate.scores import BY, OF_TASKS, Figures
from zero_mpi.files.foreign import shown

NO_NUMBER = "-"
DIFFERENCE = "difference"
ANSWERS = "right answers by"
TITLES = {"log_likelihood": "log-likelihood", "per_token": "per token", "per_byte": "per byte"}


def lines(figures: Figures) -> Iterator[str]:
    """All lines of the answer, made of nothing but what --json writes."""
    names = [shown(model["model"], 40) for model in figures["models"]]
    rows = figures["models"] + ([figures[DIFFERENCE]] if DIFFERENCE in figures else [])
    names += [DIFFERENCE] * (len(rows) - len(names))
    width = max(map(len, (*names, ANSWERS)))
    for name, model in zip(names, figures["models"], strict=False):
        yield f"{name:{width}}  {model['arch']}, {model['parameters']:,} parameters, {model['precision']}"
    if "text" in figures:
        yield from ("", *about_text(figures["text"]), "")
        yield f"{'':{width}} {'nats a token':>14} {'+-':>10} {'perplexity':>14} {'bits a byte':>12}"
        yield from (f"{name:{width}} {text_row(row)}" for name, row in zip(names, rows, strict=True))
    if "choices" in figures:
        yield from ("", about_choices(figures["choices"]), "")
        if "right" in rows[0]["choices"]:
            yield f"{ANSWERS:{width}}" + "".join(f" {TITLES[by]:>20}" for by in BY)
            yield from (f"{name:{width}} {choice_row(row)}" for name, row in zip(names, rows, strict=True))
        found = [name for name in OF_TASKS if name in rows[0]["choices"]]
        yield f"{'':{width}}" + "".join(f" {each:>16}" for each in found)
        for name, row in zip(names, rows, strict=True):
            yield f"{name:{width}}" + "".join(f" {number(row['choices'][each], 4):>16}" for each in found)


def about_text(text: dict[str, Any]) -> Iterator[str]:
    """What of the text was predicted."""
    some = "" if text["windows"] == text["windows_of_the_text"] else f" of {text['windows_of_the_text']:,}"
    kind, every = "windows of", f"a new one every {text['stride'] or 0:,}"
    if text["stride"] is None:
        kind, every = "conversations of at most", "what counts of them"
    yield (
        f"{text['windows']:,}{some} {kind} {plural(text['context'], 'token')}, {every}: "
        f"{plural(text['tokens'], 'token')} predicted"
        + ("" if text["bos"] is None else ", bos in front of each")
        + ("" if text["bytes"] is None else f", {plural(text['bytes'], 'byte')} of text")
    )
    rest = text["tokens_after_the_last_window"]
    if rest:
        yield f"{plural(rest, 'token')} at the end fill no window and do not count"


def text_row(row: Figures) -> str:
    """Loss, its error, perplexity and bits."""
    text = row["text"]
    return (
        f"{number(text['loss'], 6):>14} {number(text['standard_error'], 6):>10} "
        f"{number(text['perplexity'], 4):>14} {number(text['bits_per_byte'], 6):>12}"
    )


def about_choices(choices: dict[str, Any]) -> str:
    """How many questions there were."""
    cut = (
        f", {choices['cut']:,} without their beginnings, which are beyond the context"
        if choices["cut"]
        else ""
    )
    return f"{plural(choices['questions'], 'question')} with {plural(choices['answers'], 'answer')}{cut}"


def choice_row(row: Figures) -> str:
    """Right answers, and their share of all questions."""
    choices = row["choices"]
    cells = [f"{choices['right'][by]:,} ({100 * choices['accuracy'][by]:.2f} %)" for by in BY]
    return " ".join(f"{cell:>20}" for cell in cells)


def number(value: float | None, places: int) -> str:
    """A number with so many places, if there is one."""
    return NO_NUMBER if value is None else f"{value:,.{places}f}"
