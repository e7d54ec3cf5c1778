"""`zero-mpi evaluate`: from the flags to the figures, on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from zero_mpi.cli.text import write
from zero_mpi.commands.evaluate.candidate import Candidate, Opened, cautions, look
from zero_mpi.commands.evaluate.material import Material, gather_material
from zero_mpi.commands.evaluate.measure import grouped, measure
from zero_mpi.commands.evaluate.scores import Figures, choice_figures, differences, lines, text_figures
from zero_mpi.commands.evaluate.task import Task, make_parser, read_task
from zero_mpi.device.types import Array
from zero_mpi.files.atomic import write_json
from zero_mpi.files.open import check_target
from zero_mpi.launch.consistency import SAME_FILES, check, check_installation, check_not_alone, same
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.models.model_config import elements
from zero_mpi.telemetry import log
from zero_mpi.train.resolve import try_operations
from zero_mpi.train.same_flags import obey_early

__all__ = ["command", "main", "make_parser"]


def command(world: World, arguments: Sequence[str]) -> int:
    """Evaluate, and tell the figures. Returns the exit status."""
    check_not_alone(world)
    check_installation(world)
    task: Task = world.together(lambda: read_task(arguments))
    log.install(world.rank, world.size).to_stderr = True  # stdout has the figures and nothing else
    check(world.comm, task.facts(), "start all ranks with the same flags and variables")
    if task.json is not None:
        world.on_root(lambda: check_target("--json", task.json or ""))
    watchdog = Watchdog(world.rank, task.config.timeout, world.kill)
    try:
        figures = evaluate_all(world, task, watchdog)
    finally:
        watchdog.stop()
    world.on_root(lambda: tell(task, figures))
    return 0


def evaluate_all(world: World, task: Task, watchdog: Watchdog) -> Figures:
    """The figures of all models, the same on all ranks. Collective; raises UsageError on all of them."""
    watchdog.beat("opening the models")
    opened: Opened = same(world.comm, partial(look, task, world.node.rank), SAME_FILES)
    watchdog.beat("reading the text")
    material = gather_material(world, task, opened)
    watchdog.beat("trying the operations")
    notes: list[str] = []
    try_operations(world, opened.config, opened.threads, notes)
    notes += map(log.Caution, cautions(task, opened))
    for note in notes if world.rank == 0 else ():
        log.tell(note)
    sets = [found for found in (material.windows, *material.answers) if found is not None]
    models = [
        figures_of(task, candidate, material, measure(world, opened.config, candidate, sets, watchdog))
        for candidate in opened.candidates
    ]
    return joined(material, models)


def figures_of(task: Task, candidate: Candidate, material: Material, losses: list[Array]) -> Figures:
    """What is said of one model; `losses` of its windows, then of its answers."""
    left = list(losses)
    found: Figures = {
        "model": candidate.title,
        "arch": candidate.model.arch,
        "parameters": elements(candidate.model),
        "precision": task.config.precision,
    }
    if material.windows is not None:
        found["text"] = text_figures(left.pop(0), material.tokens, material.text["bytes"])
    if material.choices is not None:
        found["choices"] = choice_figures(left[0], material.choices, *left[1:])
    return found


def joined(material: Material, models: list[Figures]) -> Figures:
    """All figures: of the material, of each model, and the difference of two."""
    found: Figures = {}
    if material.windows is not None:
        found["text"] = material.text
    if (choices := material.choices) is not None:
        found["choices"] = {
            "questions": len(choices.counts),
            "answers": len(choices.sequences),
            "right": choices.right,
            "cut": choices.cut,
            "answer_tokens": grouped(choices.tokens, choices.counts),
            "answer_bytes": grouped(choices.nbytes, choices.counts),
        }
    found["models"] = models
    if len(models) > 1:
        found["difference"] = differences(models[0], models[1], material.tokens)
    return found


def tell(task: Task, figures: Figures) -> None:
    """Print the figures, and write them to the file of --json; UsageError if that cannot be."""
    write(lines(figures))
    if task.json is not None:
        write_json("--json", task.json, figures)


def main() -> None:
    """Entry point of the command."""
    obey_early(sys.argv[1:], lambda arguments: read_task(arguments).config)
    run("evaluate", command, sys.argv[1:])
