"""`python -m zero_mpi.train`: trains a model as the flags say, or with `--dry-run` prints a plan of the run.

A dry run checks flags, model, text and checkpoints with the same function as a run, `resolve`. So it gives
the same errors with the same exit status. Then it prints a plan for these nodes and their free shared memory,
with memory and traffic as in `zero-mpi plan`. Nothing is written, and nothing in OUT changes.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from zero_mpi import device, environment
from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.state import read_progress
from zero_mpi.cli.text import size, write
from zero_mpi.comm import kinds
from zero_mpi.config.command_line import parse
from zero_mpi.config.settings import Config
from zero_mpi.config.toml import write_config
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import exists, is_folder
from zero_mpi.launch import dev_shm
from zero_mpi.launch.consistency import check_installation
from zero_mpi.launch.folder_lock import take_folder
from zero_mpi.launch.stopping import PREPARING, signals
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.models import ModelConfig
from zero_mpi.plan.case import Case, check_sums, make_case
from zero_mpi.plan.machine import ASSUMED, assumed
from zero_mpi.plan.plan import make_plan
from zero_mpi.plan.rank_memory import checkpoint_bytes, plan_memory, resident, text_of
from zero_mpi.plan.report import ask_lines, base, introduction, memory_lines, traffic_lines
from zero_mpi.telemetry import log
from zero_mpi.telemetry.log import Caution
from zero_mpi.train import saving
from zero_mpi.train.description import obey_early
from zero_mpi.train.resolve import RunSpec, resolve
from zero_mpi.train.setup import build
from zero_mpi.train.summary import Outcome, data_rows
from zero_mpi.train.trainer import Trainer, is_over, say_over


def command(world: World, arguments: Sequence[str]) -> int:
    """Train on this rank. Return the exit status: 75 if a signal or the time limit stopped the run."""
    check_installation(world)
    config: Config = world.run_on_all(lambda: parse(arguments))
    if config.dry_run:
        signals.enter(PREPARING)
        return show(world, config)
    log.install(world.rank, world.size, config.log_level)
    watchdog, outcome = stand_guard(world, config)
    session = build(world, resolve(world, config))
    outcome.status.steps = session.config.steps  # with --epochs, the number of steps was not known earlier
    outcome.at(session.progress.step)
    if is_over(session):
        world.on_root(lambda: say_over(session))
        return 0
    notes = [*session.notes, *(world.on_root(lambda: check_disk(session.config, session.model)) or ())]
    if session.resumed:
        notes.append(f"resuming from {session.resumed} at step {session.progress.step}")
    world.on_root(lambda: saving.point_best(session))
    world.on_root(lambda: write_config(session.out, session.config))
    return Trainer(world, replace(session, notes=tuple(notes)), watchdog, outcome).run()


def stand_guard(world: World, config: Config) -> tuple[Watchdog, Outcome]:
    """Start and return a job's watchdog and its writer of status and events. Collective."""
    out = Path(config.out)
    take_folder(world, out)
    watchdog = Watchdog(world.rank, config.timeout, world.kill)
    outcome = Outcome(out, world, config.steps or 0)
    watchdog.gather(out, world.comm, at_end=outcome.end)
    world.closing.append(watchdog.stop)
    world.at_end.append(lambda status, reason: watchdog.clear())
    outcome.open()
    signals.repeats = outcome.follows_a_stop
    signals.enter(PREPARING)
    return watchdog, outcome


# ----------------------------------------------------------------------------------------------- a dry run


def show(world: World, config: Config) -> int:
    """Print the plan of a run. Return the exit status; raise UsageError as a run does. Collective."""
    world.on_root(lambda: check_out(Path(config.out)))
    spec = resolve(world, config)
    case, reason = find_case(world, spec)
    alone = world.size == 1 and not environment.under_launcher()
    write(world.on_root(lambda: [*lines(spec, case, reason, alone)]) or ())

    def check_memory() -> None:
        if spec.memory_problem:
            raise UsageError(spec.memory_problem)
        write(f"note       {note}" for note in check_disk(spec.config, spec.model))

    world.on_root(check_memory)
    return 0


def check_out(out: Path) -> None:
    place = existing(out)
    if not is_folder(place) or not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"--out {shown(out)}: cannot write there: {shown(place)} is not a writable folder")


def check_disk(config: Config, model: ModelConfig) -> list[str]:
    """Return a warning if the disk has no space for the kept checkpoints and one that is being written.

    Existing checkpoints need no more space. Raises UsageError if not even one fits. Quotas are ignored.
    """
    nbytes = checkpoint_bytes(make_case(replace(config, device=device.in_use().name), model, 1, 1))
    out, free = Path(config.out), shutil.disk_usage(existing(Path(config.out))).free
    shortage = f"--out {shown(out)}: {size(free)} free, but a checkpoint takes {size(nbytes)}"
    if free < nbytes:
        raise UsageError(f"{shortage}: free some space, or use another disk")
    count = max(1, (config.keep or 1) + 1 - len(folders.steps(out)))
    warning = f"{shortage}; --keep {config.keep} needs space for at least {count}"
    return [Caution(warning)] if free < count * nbytes else []


def existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest parent folder that exists."""
    return next(place for place in (path, *path.absolute().parents) if exists(place))


def find_case(world: World, spec: RunSpec) -> tuple[Case, str]:
    """Return the case to plan for these ranks, and why --transport cannot be used, or "". Collective."""
    nodes, problem = 1, ""
    if world.size > 1:
        from zero_mpi.comm.topology import find_topology, node_communicator

        node = node_communicator(world.mpi.COMM_WORLD)
        topology = find_topology(world.mpi.COMM_WORLD, node)
        node.Free()
        nodes, problem = topology.nodes, topology.problem if topology.nodes > 1 else ""
    if problem and spec.config.strategy == "hybrid-shard":
        raise UsageError(f"--strategy hybrid-shard: {problem}; use full-shard")
    settings = replace(spec.config, device=device.in_use().name)
    case: Case = world.run_on_all(lambda: make_case(settings, spec.model, world.size, nodes))
    if world.mpi is None:
        case = replace(case, transport_wanted=kinds.SERIAL)
    if case.transport.shares_memory:
        from zero_mpi.comm.shared.memory import MARGIN, space_problem

        need = plan_memory(case).node_shared + MARGIN
        fault = space_problem(need) if world.node.rank == 0 else ""
        faults = [problem, *world.comm.allgather_object(fault)]
        problem = next(filter(None, faults), "")
        case = replace(case, transport_wanted=kinds.MPI) if problem else case
    world.run_on_all(lambda: check_sums(case))
    return case, problem


# ------------------------------------------------------------------------------------------- the text


def lines(spec: RunSpec, case: Case, reason: str, alone: bool) -> Iterator[str]:
    """Yield the lines of a dry run, on rank 0. Raise UsageError for a checkpoint without progress counts.

    reason: cause of another transport than the requested one; alone: whether no launcher started this process
    """
    assert spec.corpus is not None and spec.loader is not None, "expected the text on rank 0"  # noqa: PT018
    config = spec.config
    machine = assumed(case.on_gpu, case.precision_name)
    plan = make_plan(case, machine)
    yield "dry run: nothing is written. Without --dry-run, this run would start:"
    if alone:
        yield "one rank, without mpirun; try `mpirun -n N ...`, or estimate more ranks with zero-mpi plan"
    yield ""
    yield f"model      {next(introduction(case, ASSUMED, ()))}"
    if case.model.stored:
        yield f"base       {base(case)}"
    yield f"strategy   {config.strategy}, {'exact' if case.exact else 'fast'} reduction"
    yield f"transport  {transport(config.transport, case, reason)}"
    yield f"device     {device.in_use().name}, {config.precision}"
    for title, text in data_rows(config, spec.corpus, spec.loader):
        if text:
            yield f"{title:11}{text}"
    yield f"step       {case.tokens:,} tokens: {config.steps * case.tokens:,} in total"
    yield from out_lines(spec, case)
    yield from (f"note       {note}" for note in spec.notes)
    yield ""
    yield from memory_lines([plan])
    yield ""
    yield from traffic_lines([plan])
    yield ""
    yield "host memory per node"
    yield from ask_lines([resident(case, plan.memory, text_of(spec.corpus), config.sample > 0)])
    yield ""
    yield "for the time per step, run zero-mpi plan with these flags and --doctor FILE (from zero-mpi doctor)"


def transport(flag: str, case: Case, reason: str) -> str:
    """Return the transport as text, with a remark if --transport auto chose it."""
    auto, text = flag == "auto", case.transport.text
    if case.transport.on_gpu:
        text = "from GPU to GPU by MPI if a test succeeds, else through the host" if auto else flag
    clause = f", because {reason}" if reason else ""
    return text + clause + (" (chosen by --transport auto)" if auto else "")


def out_lines(spec: RunSpec, case: Case) -> Iterator[str]:
    """Yield the lines on the step at which the run begins and on the files that it writes."""
    config, checkpoint = spec.config, spec.checkpoint
    if checkpoint is None:
        start = "at step 0" if config.init is None else f"at step 0, with the weights of {config.init}"
    else:
        step = read_progress(checkpoint.files.state).step
        remaining = max(0, config.steps - step)
        start = f"at step {step:,}, from {checkpoint.folder}: {remaining:,} step(s) left"
    yield f"begins     {start}"
    interval = "10 minutes" if config.save_every is None else f"{config.save_every:,} steps"
    schedule = "at the end" if config.save_every == 0 else f"every {interval} and at the end"
    best, verb = (
        ("", "stay") if config.patience is None else (" and at each new best", "and the best are kept")
    )
    policy = f"the newest {config.keep} {verb}" if config.keep else "all stay"
    yield (
        f"writes     to {config.out}: a checkpoint {schedule}{best}, about {size(checkpoint_bytes(case))} "
        f"each, {policy}; {size(shutil.disk_usage(existing(Path(config.out))).free)} free"
    )


def main() -> None:
    """Run the command."""
    signals.listen()
    if not environment.local_rank():
        dev_shm.sweep()
    obey_early(sys.argv[1:])  # before `run`, which starts MPI
    run("train", command, sys.argv[1:])
