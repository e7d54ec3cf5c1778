"""`--dry-run`: what the very run of these flags would take and do, on these ranks and hosts; then it stops.

What a run looks at before its first step is looked at by the same functions: flags, model, text, checkpoints,
nodes, room in shared memory. So what would be refused is refused here, with the same line and status. Memory
and traffic are those of `zero_mpi.plan`. Nothing is written, and nothing in OUT changes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zero_mpi import device, environment
from zero_mpi.checkpoint.state import read_progress
from zero_mpi.cli.text import size, write
from zero_mpi.comm import kinds
from zero_mpi.config.defaults import settled
from zero_mpi.config.inputs import passed_over
from zero_mpi.config.settings import Config
from zero_mpi.data import Corpus, StepLoader, Windows, named
from zero_mpi.errors import UsageError
from zero_mpi.files.open import exists, is_folder
from zero_mpi.files.text import shown
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.models.size import elements
from zero_mpi.plan.case import Case
from zero_mpi.plan.flags import check_layout, make_case
from zero_mpi.plan.machine import assumed
from zero_mpi.plan.plan import make_plan
from zero_mpi.plan.report import ask_lines, introduction, memory_lines, traffic_lines
from zero_mpi.plan.resident import resident, text_of
from zero_mpi.train import memory_check
from zero_mpi.train.description import describe
from zero_mpi.train.resume import Start, check_resume, find_start
from zero_mpi.train.same_flags import check_settings
from zero_mpi.train.setup import choose_device, open_model, read_corpus, set_threads, try_operations

MODEL_BYTES, STATE_BYTES = 4, 8  # of a parameter in model.gguf and in optimizer.gguf


@dataclass(frozen=True)
class Outlook:
    """What rank 0 knows of the run. why: the reason for another transport than was wished for."""

    config: Config
    case: Case
    why: str
    corpus: Corpus
    windows: int
    start: Start | None
    step: int
    notes: tuple[str, ...]


def show(world: World, config: Config) -> int:
    """Print what the run would be. Returns the exit status. Collective; raises UsageError as a run does."""
    check_settings(world, config)
    choose_device(world, config.device)
    world.on_root(lambda: check_out(Path(config.out)))
    found = look_ahead(world, config)
    if found is not None:
        write(lines(found, alone=world.size == 1 and not environment.under_launcher()))
    memory_check.check(world, config, world.share(found and found.case.model))
    return 0


def look_ahead(world: World, config: Config) -> Outlook | None:
    """The outlook, on rank 0. Collective."""
    threads, notes = world.together(lambda: set_threads(config)), list[str]()
    start = find_start(world, config, Path(config.out), notes, tidy=False)
    init, tokenizer, model = open_model(world, config, notes)
    config = world.together(lambda: settled(config, model))
    case, why = find_case(world, config, model)
    machine = {} if start is None else try_operations(world, config, threads, notes)

    def on_root() -> Outlook:
        corpus = read_corpus(config, model, tokenizer)
        windows = Windows(corpus.train, config.context)
        StepLoader(windows, batch_size=config.batch_size, micro_batch=config.micro_batch, seed=config.seed)
        if start is not None:
            check_resume(start, describe(config, model, corpus, tokenizer, init, machine), notes)
        step = 0 if start is None else read_progress(start.state).step
        told = (*notes, *corpus.notes, *passed_over(init))
        return Outlook(config, case, why, corpus, len(windows), start, step, told)

    found: Outlook | None = world.on_root(on_root)
    return found


def check_out(out: Path) -> None:
    """Raise UsageError if the run directory could not be written to."""
    place = existing(out)
    if not is_folder(place) or not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(
            f"--out {shown(out)}: cannot write there: {shown(place)} is no folder that can be written to"
        )


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if exists(place))


def find_case(world: World, config: Config, model: ModelConfig) -> tuple[Case, str]:
    """The plan's question for these ranks, and why its transport is not what was wished for. Collective."""
    nodes, problem = find_nodes(world)
    if problem and config.strategy == "hybrid-shard":
        raise UsageError(f"--strategy hybrid-shard: {problem}; use full-shard")
    settings = replace(config, device=device.in_use().name)
    case: Case = world.together(lambda: make_case(settings, model, config.strategy, world.size, nodes))
    if world.mpi is None:
        case = replace(case, transport_wanted=kinds.SERIAL)
    if case.shares_slots:
        problem = problem or no_room(world, make_plan(case, assumed(False, False)).memory.node_shared)
        case = replace(case, transport_wanted=kinds.MPI) if problem else case
    world.together(lambda: check_layout(case))
    return case, problem


def find_nodes(world: World) -> tuple[int, str]:
    """How many nodes there are, and why they cannot share the work as nodes do. Collective."""
    if world.mpi is None or world.size == 1:
        return 1, ""
    from zero_mpi.comm.topology import find_topology, node_communicator

    node = node_communicator(world.mpi.COMM_WORLD)
    topology = find_topology(world.mpi.COMM_WORLD, node)
    node.Free()
    return topology.nodes, topology.problem if topology.nodes > 1 else ""


def no_room(world: World, needed: int) -> str:
    """Why some node has no room for what its ranks would share, or an empty text. Collective."""
    from zero_mpi.comm.shared.window import MARGIN, room_problem
    from zero_mpi.comm.topology import node_communicator

    node = node_communicator(world.mpi.COMM_WORLD)
    problem = room_problem(needed + MARGIN) if node.Get_rank() == 0 else ""
    node.Free()
    return next((text for text in world.everyone(problem) if text), "")


# ------------------------------------------------------------------------------------------- the text


def lines(found: Outlook, alone: bool) -> Iterator[str]:
    """The lines of a dry run. `alone`: no launcher has started this process."""
    case, config = found.case, found.config
    plan = make_plan(case, assumed(case.on_gpu, case.precision.is_low))
    yield "dry run: nothing is written; without --dry-run it would be this run"
    if alone:
        yield "started without mpirun: of one rank; try `mpirun -n N ...`, or imagine ranks by zero_mpi.plan"
    yield ""
    yield f"model      {next(introduction(case, assumed(False, False), ()))}"
    yield f"strategy   {config.strategy}, {'exact' if case.exact else 'fast'} reduction"
    yield f"transport  {transport(found)}"
    yield f"device     {device.in_use().name}, {config.precision}"
    yield from data_lines(found)
    yield from out_lines(found)
    yield from (f"note       {note}" for note in found.notes)
    yield ""
    yield from memory_lines([plan])
    yield ""
    yield from traffic_lines([plan])
    yield ""
    yield "memory of a node's host"
    yield from ask_lines([resident(case, plan.memory, text_of(found.corpus), config.sample > 0)])
    yield ""
    yield "time of a step: python -m zero_mpi.plan, with these flags and --doctor FILE of zero_mpi.doctor"


def transport(found: Outlook) -> str:
    """What carries the collectives, and who chose it."""
    wanted, kind = found.config.transport, found.case.transport
    text = kind.text
    if kind.on_gpu:
        text = (
            "from GPU to GPU by MPI if a trial succeeds, else through the host"
            if wanted == "auto"
            else wanted
        )
    because = f", because {found.why}" if found.why else ""
    return text + because + (" (chosen by --transport auto)" if wanted == "auto" else "")


def data_lines(found: Outlook) -> Iterator[str]:
    """What is read, and how often."""
    corpus, config, case = found.corpus, found.config, found.case
    yield (
        f"data       {corpus.train.size:,} tokens to train on in {corpus.documents - corpus.val_documents:,} "
        f"documents, {corpus.val.size:,} held out, of {named(config.data)}"
    )
    epochs = config.steps * config.batch_size / found.windows
    share = f"{epochs:.1f} times through the data" if epochs >= 1 else f"{epochs:.3%} of the data"
    tokens = config.steps * case.tokens
    yield f"steps      {config.steps:,} of {case.tokens:,} tokens: {tokens:,} tokens, {share}"


def out_lines(found: Outlook) -> Iterator[str]:
    """Where the run begins, and what it leaves."""
    config, step = found.config, found.step
    if found.start is None:
        begins = "at step 0" if config.init is None else f"at step 0, with the weights of {config.init}"
    else:
        left = max(0, config.steps - step)
        begins = f"at step {step:,}, from {found.start.folder}: {left:,} step(s) are left"
    yield f"begins     {begins}"
    trained = sum(
        param.size for unit in found.case.layout.units if unit.trainable for param in unit.params.values()
    )
    each = MODEL_BYTES * elements(found.case.model) + STATE_BYTES * trained
    when = f"every {config.save_every:,} steps and at the end" if config.save_every else "at the end"
    when = "every ten minutes and at the end" if config.save_every is None else when
    kept = f"the newest {config.keep} stay" if config.keep else "all stay"
    free = shutil.disk_usage(existing(Path(config.out))).free
    yield (
        f"leaves     in {config.out}: a checkpoint {when}, about {size(each)} each, {kept}; "
        f"{size(free)} are free there{', which is too little' if free < each else ''}"
    )
