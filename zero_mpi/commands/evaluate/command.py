"""`zero-mpi evaluate`: reads models and data, computes losses on all ranks, and prints the results."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zero_mpi.checkpoint.importance import write_importance
from zero_mpi.checkpoint.weights import weights_digest
from zero_mpi.cli.text import write
from zero_mpi.commands.evaluate import measure as measuring
from zero_mpi.commands.evaluate.choices import GREEDY, LAST, EncodedChoices, encode_choices
from zero_mpi.commands.evaluate.scores import Figures, choice_figures, differences, lines, text_figures
from zero_mpi.commands.evaluate.task import (
    Candidate,
    OpenInputs,
    Task,
    cautions,
    make_parser,
    open_models,
    read_task,
)
from zero_mpi.config.inputs import fingerprint
from zero_mpi.data import Corpus, Windows, holds_token_files
from zero_mpi.data.corpus import Part
from zero_mpi.data.documents import Remark
from zero_mpi.data.encoded_cache import Batches, Beat
from zero_mpi.data.packing import PackedWindows
from zero_mpi.data.teacher_file import TeacherFile
from zero_mpi.data.tokenizers.byte import bos_of
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.atomic import write_json
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import check_target
from zero_mpi.launch.consistency import (
    SAME_FILES,
    SAME_FLAGS,
    check,
    check_installation,
    own_source,
    same,
    short_digest,
)
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.models.model_config import elements
from zero_mpi.telemetry import log
from zero_mpi.train.description import obey_early, sizes_of
from zero_mpi.train.resolve import read_corpus, try_operations
from zero_mpi.train.setup import share_corpus


@dataclass(frozen=True)
class EvaluationData:
    """Data of an evaluation: windows of text, and questions."""

    windows: measuring.WindowSet | None  # windows of the text; None if there is no text
    text: dict[str, Any]  # facts about the text, for --json
    tokens: np.ndarray[Any, Any]  # number of counted tokens in each window
    answers: list[measuring.AnswerSet]  # may include a second set whose losses count wrong tokens
    choices: EncodedChoices | None


def gather_data(world: World, task: Task, opened: OpenInputs) -> EvaluationData:
    """Return the data on all ranks. Raise UsageError on all ranks if reading fails. Collective."""
    windows, text, tokens = None, dict[str, Any](), np.zeros(0, np.int64)

    def read_questions() -> EncodedChoices | None:
        if task.choices is None:
            return None
        assert opened.tokenizer is not None, "questions are text"
        context = min(subject.model.context_length for subject in opened.candidates)
        bos = bos_of(opened.tokenizer, task.config.bos)
        return encode_choices(task.choices, opened.tokenizer, context, bos, task.shots, task.delimiter)

    choices: EncodedChoices | None = world.run_on_root(read_questions)
    if task.config.data:
        notes, corpora = list[str](), list[Corpus]()
        world.run_on_root_with_beat(lambda beat: corpora.append(read_text(task, opened, beat)))
        corpus = share_corpus(world.comm, corpora[0] if corpora else None, notes)
        cut = cut_up(corpus.parts[0], opened.config.context, task.stride)
        for note in (*corpus.notes, *cut.notes(), *notes) if world.rank == 0 else ():
            if not isinstance(note, Remark):
                log.log_note(log.Caution(note))
        windows = measuring.WindowSet(cut, opened.config.micro_batch, task.windows)
        tokens = measuring.counted(windows, np.ones(opened.candidates[0].model.vocab_size, np.int64))
        text = about(cut, windows, corpus, opened) | {"tokens": int(tokens.sum())}
    answers = []
    if choices is not None:
        scales = (1.0, 0.0) if choices.span in (GREEDY, LAST) else (1.0,)
        answers = [measuring.AnswerSet(choices, opened.config.micro_batch, scale) for scale in scales]
    return EvaluationData(windows, text, tokens, answers, choices)


def read_text(task: Task, opened: OpenInputs, beat: Beat) -> Corpus:
    """Return the tokens of --data. Raise UsageError if the data does not fit the other flags."""
    config = opened.config
    Windows(np.zeros(0, np.int64), config.context, task.stride)
    tokenizer = None if holds_token_files(config.data) else opened.tokenizer
    corpus = read_corpus(config, opened.candidates[0].model, tokenizer, Batches(beat))
    if len(corpus.parts) > 1:
        raise UsageError("--data: expected paths without shares: evaluate one source at a time")
    if corpus.train.counted is not None and task.stride is not None:
        raise UsageError(f"--stride {task.stride}: conversations have no stride: leave it out")
    if corpus.train.counted is not None and task.imatrix is not None:
        raise UsageError(f"--imatrix {task.imatrix}: conversations are padded: use a text")
    if not len(cut_up(corpus.parts[0], config.context, task.stride)):
        raise UsageError(f"--context {config.context}: no answer begins within the context: use a larger one")
    return corpus


Cut = Windows | PackedWindows


def cut_up(part: Part, context: int, stride: int | None) -> Cut:
    """Return the windows of a text; for conversations, one window from the beginning of each."""
    if part.stream.counted is None:
        return Windows(part.stream.ids, context, stride, part.bos)
    return PackedWindows(part.stream, context, packs=False)


def about(cut: Cut, windows: measuring.WindowSet, corpus: Corpus, opened: OpenInputs) -> dict[str, Any]:
    """Return all facts about the text except its number of counted tokens."""
    stride, rest, nbytes, bos = None, 0, None, corpus.parts[0].bos
    if opened.tokenizer is not None:
        decode, size = opened.tokenizer.decode, opened.tokenizer.vocab_size
        lengths = np.array([len(decode([i])) for i in range(size)], np.int64)  # bytes of text of each id
        nbytes = int(measuring.counted(windows, lengths).sum())
    if isinstance(cut, Windows):
        first = 1 if bos is None else 0  # index of the first token that is predicted
        stride, rest = cut.stride, corpus.train.size - first - (len(cut) - 1) * cut.stride - cut.context
    return {
        "context": cut.context,
        "stride": stride,
        "bos": bos,
        "windows": windows.count,
        "windows_of_the_text": len(cut),
        "tokens": 0,
        "bytes": nbytes,
        "tokens_of_the_text": corpus.train.size,
        "tokens_after_the_last_window": rest,
        "sha256": corpus.sha256,
    }


__all__ = ["command", "main", "make_parser"]


def command(world: World, arguments: Sequence[str]) -> int:
    """Evaluate and print the results. Return the exit status."""
    check_installation(world)
    task: Task = world.run_on_all(lambda: read_task(arguments))
    log.install(world.rank, world.size).to_stderr = True  # stdout has only the results
    check(world.comm, task.facts(), SAME_FLAGS)
    for flag, path in (("--json", task.json), ("--imatrix", task.imatrix), ("--top-k-out", task.top_k_out)):
        if path is not None:
            world.on_root(partial(check_target, flag, path))
    watchdog = Watchdog(world.rank, task.config.timeout, world.kill)
    try:
        figures = evaluate_all(world, task, watchdog)
    finally:
        watchdog.stop()
    world.on_root(lambda: write(lines(figures)))
    if task.json is not None:
        world.on_root(partial(write_json, "--json", task.json, figures))
    return 0


def evaluate_all(world: World, task: Task, watchdog: Watchdog) -> Figures:
    """Return the results of all models, on all ranks. Raise UsageError if an input is invalid. Collective."""
    watchdog.beat("opening the models")
    opened: OpenInputs = same(world.comm, partial(open_models, task, world.node.rank), SAME_FILES)
    watchdog.beat("reading the text")
    dataset = gather_data(world, task, opened)
    watchdog.beat("trying the operations")
    notes: list[str] = []
    try_operations(world, opened.config, opened.threads, notes)
    notes += map(log.Caution, cautions(task, opened))
    for note in notes if world.rank == 0 else ():
        log.log_note(note)
    sets = [each for each in (dataset.windows, *dataset.answers) if each is not None]
    models, text, first = [], dataset.text, opened.candidates[0].model
    importance = None if task.imatrix is None else measuring.Importance(first, world.comm)
    for subject, matrix in zip(opened.candidates, (importance, None), strict=False):
        losses = measuring.measure(world, opened.config, subject, sets, watchdog, matrix)
        models.append(figures_of(task, subject, dataset, losses))
    figures = joint_figures(dataset, models)
    if importance is not None and task.imatrix is not None:
        totals, texts = importance.totals(), [shown(path) for path in task.config.data]
        arguments = task.imatrix, totals, texts, text["windows"], text["context"]
        world.on_root(lambda: write_importance(*arguments))
    if task.kl and dataset.windows is not None:
        operands = opened.candidates, dataset.windows, text["tokens"]
        figures["divergence"] = measuring.divergence(world, opened.config, *operands, watchdog)
    write_teacher(world, task, opened, dataset, watchdog)
    return figures


def write_teacher(
    world: World, task: Task, opened: OpenInputs, dataset: EvaluationData, watchdog: Watchdog
) -> None:
    """Write the file of --top-k-out, if it is set. Collective."""
    if task.top_k_out is None or dataset.windows is None:
        return
    first, text = opened.candidates[0], dataset.text
    facts = text["tokens_of_the_text"], first.model.vocab_size, text["sha256"], fingerprint(opened.tokenizer)
    teacher = TeacherFile(task.top_k, float(task.temperature), *facts, predictor_digest(task, opened))
    with measuring.opened_module(world, opened.config, first, watchdog) as module:
        measuring.write_top_k(world, module, dataset.windows, task.top_k_out, teacher)
        del module


def predictor_digest(task: Task, opened: OpenInputs) -> str:
    """Return a digest of the model and of the settings on which its predictions for given data depend."""
    model, config = opened.candidates[0], opened.config
    names = ("context", "bos", "micro_batch", "precision", "bits", "device")
    settings = [task.stride, *(getattr(config, name) for name in names)]
    return short_digest((own_source(), weights_digest(model.source), sizes_of(model.model), settings))


def figures_of(task: Task, subject: Candidate, dataset: EvaluationData, losses: list[Array]) -> Figures:
    """Return the results of one model. `losses` has an array for the windows, then arrays for the answers."""
    figures: Figures = {
        "model": subject.title,
        "arch": subject.model.arch,
        "parameters": elements(subject.model),
        "precision": task.config.precision,
    }
    if dataset.windows is not None:
        nats, *losses = losses
        figures["text"] = text_figures(nats, dataset.tokens, dataset.text["bytes"])
    if dataset.choices is not None:
        figures["choices"] = choice_figures(losses[0], dataset.choices, *losses[1:])
    return figures


def joint_figures(dataset: EvaluationData, models: list[Figures]) -> Figures:
    """Return the facts about the data, the results of each model, and the difference between two models."""
    figures: Figures = {}
    if dataset.windows is not None:
        figures["text"] = dataset.text
    if (choices := dataset.choices) is not None:
        figures["choices"] = {
            "questions": len(choices.counts),
            "answers": len(choices.sequences),
            "right": choices.right,
            "cut": choices.cut,
            "answer_tokens": measuring.groups_of(choices.tokens, choices.counts),
            "answer_bytes": measuring.groups_of(choices.nbytes, choices.counts),
        }
    figures["models"] = models
    if len(models) > 1:
        figures["difference"] = differences(models[0], models[1], dataset.tokens)
    return figures


def main() -> None:
    obey_early(sys.argv[1:], lambda arguments: read_task(arguments).config)
    run("evaluate", command, sys.argv[1:])
