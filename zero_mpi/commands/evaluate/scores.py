"""Computes results from losses. Losses are summed in text order, so the number of ranks has no effect.

Results are numbers in dictionaries, as `--json` writes them. None means that a number is missing.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from zero_mpi.cli.text import plural
from zero_mpi.commands.evaluate.choices import CORE, TEXT, EncodedChoices
from zero_mpi.commands.evaluate.measure import groups_of
from zero_mpi.device.types import Array
from zero_mpi.files.foreign import shown
from zero_mpi.sharding.rounds import ordered_total

BY = ("log_likelihood", "per_token", "per_byte")  # scores by which answers are compared
ACC = ("acc", "acc_norm", "acc_bytes")  # accuracies as lm-evaluation-harness defines them
OF_TEXTS = {"loss": 6, "standard_error": 6, "perplexity": 4, "bits_per_byte": 6}  # with decimal places
OF_TASKS = (*ACC, "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
Figures = dict[str, Any]


def text_figures(nats: Array, tokens: Array, nbytes: int | None) -> Figures:
    """Return the results for a text, given the loss in nats and the counted tokens of each window, (n,).

    loss              nats per token: the sum of all nats, divided by the number of tokens
    standard_error    standard error of the loss, from differences between windows; None for one window
    perplexity        exp(loss); None if this overflows float64
    bits_per_byte     the sum of all nats as bits, divided by `nbytes`, the bytes of the counted tokens
    window_losses     nats per token of each window
    """
    total, count = ordered_total(nats), int(tokens.sum())
    loss = total / count
    return {
        "loss": loss,
        "standard_error": standard_error(nats, tokens),
        "perplexity": perplexity(loss),
        "bits_per_byte": total / math.log(2) / nbytes if nbytes else None,
        "window_losses": (nats / tokens).tolist(),
    }


def perplexity(loss: float) -> float | None:
    """Return exp(loss), or None if float64 cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return None


def standard_error(nats: Array, tokens: Array) -> float | None:
    """Return the standard error of sum(`nats`) / sum(`tokens`), as if windows were drawn at random.

    It is the error of a ratio (Cochran, "Sampling Techniques", 1977, 2.11), because the first of overlapping
    windows has more tokens than the others. The error of a single window is None.
    """
    if len(nats) < 2:
        return None
    count, loss = int(tokens.sum()), ordered_total(nats) / int(tokens.sum())
    squares = ordered_total((nats - loss * tokens) ** 2)
    return math.sqrt(squares * len(nats) / (len(nats) - 1)) / count


def choice_figures(losses: Array, choices: EncodedChoices, misses: Array | None = None) -> Figures:
    """Return the results. The preferred answer has the highest log-likelihood: total, per token or per byte.

    acc                fraction right by log-likelihood; for tasks of CORE by log-likelihood per token
    acc_norm           fraction right by log-likelihood per character (no leading space); acc_bytes per byte
    right              number of questions whose right answer is preferred; the first of equal answers wins
    accuracy           each number in `right` as a fraction of all questions
    log_likelihoods    log-likelihood in nats of each answer of each question
    """
    likelihoods = groups_of((-losses).tolist(), choices.counts)
    if choices.span == TEXT:  # rolling texts
        texts = ([*group, ""][0] for group in groups_of(choices.answers, choices.counts))
        words, nbytes = sum(len(re.split(r"\s+", text)) for text in texts), sum(choices.nbytes)
        nats = ordered_total(losses)
        scores = {"word_perplexity": perplexity(nats / words), "byte_perplexity": perplexity(nats / nbytes)}
        return {**scores, "bits_per_byte": nats / nbytes / math.log(2), "log_likelihoods": likelihoods}
    if misses is not None:  # numbers of wrong tokens: an answer is right without any
        scores = {"acc": float((misses == 0).mean()), "perplexity": perplexity(float(losses.mean()))}
        return {**scores, "log_likelihoods": likelihoods}
    answers = [answer.removeprefix(" ") for answer in choices.answers]
    divisors = {
        "log_likelihood": np.ones(len(losses)),
        "per_token": choices.tokens,
        "per_byte": choices.nbytes,
        "acc_norm": [max(1, len(answer)) for answer in answers],
        "acc_bytes": [max(1, len(answer.encode())) for answer in answers],
    }
    right = dict[str, int]()
    for name, divisor in divisors.items():
        of_questions = groups_of((-losses / np.asarray(divisor, np.float64)).tolist(), choices.counts)
        first = [scores.index(max(scores)) for scores in of_questions]
        right[name] = sum(chosen == each for chosen, each in zip(first, choices.right, strict=True))
    shares = {name: count / len(choices.counts) for name, count in right.items()}
    return {
        "right": {name: right[name] for name in BY},
        "accuracy": {name: shares[name] for name in BY},
        "acc": shares["per_token" if choices.span in CORE else "log_likelihood"],
        **{name: shares[name] for name in ACC[1:]},
        "log_likelihoods": likelihoods,
    }


def differences(model: Figures, base: Figures, tokens: Array) -> Figures:
    """Return `model` minus `base` for each result, and the standard error of the difference in loss.

    Both models read the same windows, so windows that are hard for both do not increase this error.
    """
    figures: Figures = {}
    if "text" in model:
        ours, theirs = model["text"], base["text"]
        figures["text"] = {
            name: minus(ours[name], theirs[name]) for name in ("loss", "perplexity", "bits_per_byte")
        }
        nats = (np.array(ours["window_losses"]) - np.array(theirs["window_losses"])) * tokens
        figures["text"]["standard_error"] = standard_error(nats, tokens)
    if "choices" in model:
        ours, theirs = model["choices"], base["choices"]
        figures["choices"] = {name: minus(ours[name], theirs[name]) for name in OF_TASKS if name in ours}
        for name in ("right", "accuracy") if "right" in ours else ():
            figures["choices"][name] = {score: ours[name][score] - theirs[name][score] for score in BY}
    return figures


def minus(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


DIFFERENCE = "difference"
ANSWERS = "right answers by"
TITLES = {"log_likelihood": "log-likelihood", "per_token": "per token", "per_byte": "per byte"}


def lines(figures: Figures) -> Iterator[str]:
    """Yield all lines of the output. Every value in them is also in the --json file."""
    names = [shown(model["model"], 40) for model in figures["models"]]
    width = max(map(len, (*names, ANSWERS)))
    results = figures["models"] + ([figures[DIFFERENCE]] if DIFFERENCE in figures else [])
    rows = [(f"{name:{width}}", row) for name, row in zip([*names, DIFFERENCE], results, strict=False)]
    for name, model in rows[: len(names)]:
        yield f"{name}  {model['arch']}, {model['parameters']:,} parameters, {model['precision']}"
    if "text" in figures:
        yield from ("", *about_text(figures["text"]), "")
        yield f"{'':{width}} {'nats/token':>14} {'+-':>10} {'perplexity':>14} {'bits/byte':>12}"
        for name, row in rows:
            cells = [number(row["text"][key], places) for key, places in OF_TEXTS.items()]
            yield "{} {:>14} {:>10} {:>14} {:>12}".format(name, *cells)
    if "divergence" in figures:
        stats = figures["divergence"]
        yield (
            f"KL divergence from {names[1]}: {stats['kl']:.6f} nats/token; RMS change of the next token's "
            f"probability: {100 * stats['rms_change']:.3f} %; same top token: {100 * stats['same_top']:.2f} %"
        )
    if "choices" in figures:
        choices = figures["choices"]
        cut = f", {choices['cut']:,} cut at the beginning to fit the context" if choices["cut"] else ""
        yield ""
        yield f"{plural(choices['questions'], 'question')} with {plural(choices['answers'], 'answer')}{cut}"
        yield ""
        yield from choice_lines([(name, row["choices"]) for name, row in rows], width)


def choice_lines(rows: list[tuple[str, Figures]], width: int) -> Iterator[str]:
    """Yield the tables of right answers and of accuracies; each row has a name of `width` characters."""
    _, first = rows[0]
    if "right" in first:
        yield f"{ANSWERS:{width}}" + "".join(f" {TITLES[score]:>20}" for score in BY)
        for name, row in rows:
            cells = [f"{row['right'][score]:,} ({100 * row['accuracy'][score]:.2f} %)" for score in BY]
            yield name + "".join(f" {cell:>20}" for cell in cells)
    stats = [stat for stat in OF_TASKS if stat in first]
    yield " " * width + "".join(f" {stat:>16}" for stat in stats)
    for name, row in rows:
        yield name + "".join(f" {number(row[stat], 4):>16}" for stat in stats)


def about_text(text: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the part of the text that was predicted."""
    total = "" if text["windows"] == text["windows_of_the_text"] else f" of {text['windows_of_the_text']:,}"
    kind, detail = "windows of", f"a new one every {text['stride'] or 0:,}"
    if text["stride"] is None:
        kind, detail = "conversations of at most", "their trained tokens"
    yield (
        f"{text['windows']:,}{total} {kind} {plural(text['context'], 'token')}, {detail}: "
        f"{plural(text['tokens'], 'token')} predicted"
        + ("" if text["bos"] is None else ", BOS before each window")
        + ("" if text["bytes"] is None else f", {plural(text['bytes'], 'byte')} of text")
    )
    if rest := text["tokens_after_the_last_window"]:
        yield f"{plural(rest, 'token')} left out at the end: too few for a window"


def number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:,.{places}f}"
