"""`python -m zero_mpi.train`: from the flags to the end of a run, on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zero_mpi import environment
from zero_mpi.cli.text import plural
from zero_mpi.config.command_line import parse
from zero_mpi.config.settings import Config
from zero_mpi.config.toml import write_config
from zero_mpi.launch import dev_shm
from zero_mpi.launch.consistency import check_installation
from zero_mpi.launch.folder_lock import take_folder
from zero_mpi.launch.stopping import PREPARING, signals
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run
from zero_mpi.telemetry import log
from zero_mpi.train import dry_run, saving
from zero_mpi.train.description import obey_early
from zero_mpi.train.resolve import resolve
from zero_mpi.train.setup import build
from zero_mpi.train.summary import Outcome
from zero_mpi.train.trainer import Trainer, is_over, say_over


@signals.heard()
def command(world: World, arguments: Sequence[str]) -> int:
    """Do the full run on this rank. Return the exit status, 75 where the run was asked to stop."""
    check_installation(world)
    config: Config = world.together(lambda: parse(arguments))
    if config.dry_run:
        signals.enter(PREPARING)
        return dry_run.show(world, config)
    log.install(world.rank, world.size, config.log_level)
    phase = log.Phases()
    watchdog, outcome = stand_guard(world, config)
    session = build(world, resolve(world, config))
    if session.resumed:
        session.notes.append(f"resuming from {session.resumed} at step {session.progress.step}")
    phase("the run is prepared")
    outcome.status.steps = session.config.steps  # --epochs has no number of steps before
    outcome.at(session.progress.step)
    if is_over(session):
        world.on_root(lambda: say_over(session))
        return 0
    session.notes += world.on_root(lambda: dry_run.check_disk(session.config, session.model)) or ()
    world.on_root(lambda: saving.point_best(session))
    world.on_root(lambda: write_config(session.out, session.config))
    sizes = [size for rank in world.comm.allgather_object(dev_shm.removed) for size in rank]
    if sizes:
        files, size = plural(len(sizes), "file"), sum(sizes) / 2**20
        session.notes.append(f"removed {files} ({size:.1f} MiB) of killed jobs in {dev_shm.PLACE}")
    return Trainer(world, session, watchdog, outcome).run()


def stand_guard(world: World, config: Config) -> tuple[Watchdog, Outcome]:
    """Start the watchdog of a job and the writer of its status, and return both. Collective."""
    out = Path(config.out)
    folder = take_folder(world, out)
    watchdog = Watchdog(world.rank, config.timeout, world.kill)
    outcome = Outcome(out, world, config.steps or 0, folder)
    watchdog.gather(out, world.comm, tell=outcome.end)
    world.closing.append(watchdog.stop)
    world.at_end.append(lambda status, reason: watchdog.clear())
    outcome.open()
    signals.again = outcome.follows_a_stop
    signals.enter(PREPARING)
    return watchdog, outcome


def main() -> None:
    """Run the command."""
    signals.listen()
    if not environment.local_rank():
        dev_shm.sweep()
    obey_early(sys.argv[1:])  # MPI starts in `run`
    run("train", command, sys.argv[1:])
