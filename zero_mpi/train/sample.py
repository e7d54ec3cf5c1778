"""End of a run on rank 0: its validation loss beside the entropy of letter frequencies; a sample.

A run that has nothing left to do when it starts says so, and changes nothing.
"""

from __future__ import annotations

import numpy as np

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.weights import open_merged
from zero_mpi.data import unigram_entropy
from zero_mpi.telemetry import events, log
from zero_mpi.telemetry.events import Events
from zero_mpi.train.early_stop import reason
from zero_mpi.train.observers import check_recorded
from zero_mpi.train.setup import Session
from zero_mpi.train.text_model import TextModel


def is_over(session: Session) -> bool:
    """Return whether the resumed run has ended before; the same on all ranks."""
    made_all = session.progress.step >= session.config.steps
    has_stopped = session.progress.best.is_used_up(session.config.patience)
    return session.resumed is not None and (made_all or has_stopped)


def say_over(session: Session) -> None:
    """Say that there is nothing left to do; raises JobError if the run did not end well."""
    step, steps = session.progress.step, session.config.steps
    check_recorded(session.out, step)
    state = f"and --steps is {steps}; to train longer, increase --steps (or --epochs)"
    if step < steps:
        why = reason(session.progress.best)
        state = f"where the run stopped early, {why}; to train longer, increase --patience"
    log.info(
        "nothing to do: %s is at step %d, %s; for a new run use another --out", session.resumed, step, state
    )


def compare_with_letters(session: Session, val_loss: float | None) -> None:
    """Print the validation loss beside the entropy of the same text's token frequencies."""
    held_out = session.held_out
    if val_loss is None or not held_out:
        return
    targets = np.concatenate([batch.targets.ravel() for batch in held_out.batches()])
    log.info(
        "validation loss %.4f nats per token; unigram entropy of the same text: %.4f",
        val_loss,
        unigram_entropy(targets[targets != UNCOUNTED]),
    )


def show_sample(session: Session, step: int, noted: Events) -> None:
    """Print text generated from the file that was just written."""
    config, tokenizer = session.config, session.tokenizer
    if tokenizer is None or not config.sample:
        return
    path = folders.weights_in(folders.step_folder(session.out, step))
    if not path.exists():
        return
    base = config.init if session.model.lora is not None else None
    model = TextModel(path if base is None else open_merged(base, path))
    prompt = tokenizer.encode_prompt(config.prompt)
    ids = [*prompt.tolist(), *model.generate(prompt, config.sample, seed=config.seed)]
    text = tokenizer.decode(ids).decode("utf-8", "replace")
    log.info_text(f"sample of {path}:", text)
    noted.note(events.SAMPLE, folder=path.parent.name, prompt=config.prompt, text=text)
