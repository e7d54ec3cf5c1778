"""`--peer-checkpoint N`: copies of the state in the memory of this host and another, every N steps.

A run that begins looks for them beside its checkpoints, and the later of both counts. Copies are of a run if
they were made for its folder with its settings, and if the chain over its records holds the line that was the
last one then. They stay where a job fails and go where it ends well, for then there is a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zero_mpi.checkpoint.copy_file import CopyPlace, held, ours, remove
from zero_mpi.checkpoint.copy_record import CopyRecord
from zero_mpi.checkpoint.copy_search import find_copies, load_copies, texts
from zero_mpi.checkpoint.peer_copies import PeerCopies
from zero_mpi.checkpoint.state import Description, TrainingProgress
from zero_mpi.cli.text import size
from zero_mpi.comm.agree import results
from zero_mpi.comm.members import members_of
from zero_mpi.comm.neighbours import Neighbours, ring
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.launch.leftovers import PLACE
from zero_mpi.launch.world import World
from zero_mpi.session.resume import changes_between
from zero_mpi.session.setup import Session
from zero_mpi.telemetry import log, spans
from zero_mpi.telemetry.metrics import Records
from zero_mpi.telemetry.proof import PROOF, knows

AUTO = "auto"  # of --resume
ONE_HOST = (
    "--peer-checkpoint: all ranks are on one host, so copies survive the loss of a rank and not of the host"
)


class MemoryCopies:
    """The copies of a session: which there were at its start, and those that it makes. Collective.

    tick: is told what is going on, for a watchdog; place: shared memory
    """

    def __init__(
        self, world: World, session: Session, tick: Callable[[str], None], place: Path = PLACE
    ) -> None:
        self._every, self._world, self._session = session.config.peer_checkpoint, world, session
        if self._every is None:
            return
        run, job = world.from_root(
            lambda: (run_of(session.config, session.description), secrets.token_hex(4))
        )
        self._take_up(run, place)
        nodes = world.comm.nodes()
        where = CopyPlace(run, job, nodes[world.rank], place)
        neighbours = neighbours_of(world, nodes)
        state = session.optimizer, session.description
        self._copies = PeerCopies(world.comm, neighbours, where, *state, tick=tick)
        self._check_room(nodes, run, place)
        if len(set(nodes)) == 1:
            session.notes.append(log.Caution(ONE_HOST))

    def _take_up(self, run: str, place: Path) -> None:
        """Go on from the newest copies, if they are later than where the session stands."""
        session, world, faults = self._session, self._world, list[str]()
        found = None
        if session.config.resume == AUTO:
            share = world.node.rank, world.node.size
            known = partial(why_unknown, session.out / PROOF)
            found = find_copies(world.comm, run, share, place, known, faults)
            session.notes += map(log.Caution, texts(faults))
        if found is None or found.progress.step <= session.progress.step:
            stays = "", ""
        else:
            session.progress = load_copies(world.comm, found, session.optimizer, session.description)
            session.resumed, session.restored = None, f"the copies in memory of {found.record.ranks} rank(s)"
            record, now = found.record, session.description
            session.notes += changes_between(record.machine, record.plan, now)
            stays = found.key[1:]
        if world.node.rank == 0:
            remove(run, stays, place)
        world.comm.barrier()

    def _check_room(self, nodes: list[int], run: str, place: Path) -> None:
        """Raise UsageError where a host has no room for the copies of its ranks. Collective."""
        told = results(self._world.comm, lambda: (self._copies.room, *room_in(place, run)))
        for ranks in members_of(nodes).values():
            needed = sum(told[rank][0] for rank in ranks)
            if problem := no_room(self._every, needed, *told[ranks[0]][1:], place=place):
                raise UsageError(problem)

    def begin(self, records: Records) -> None:
        """What the session goes on from gets copies of its own, and the older ones go. Collective."""
        if self._every is not None:
            if self._session.restored:
                self.save(self._session.progress, records)
            self._copies.remove_others()

    def is_due(self, step: int) -> bool:
        """Whether a copy follows step `step`; all ranks agree."""
        return self._every is not None and step % self._every == 0

    def save(self, progress: TrainingProgress, records: Records) -> None:
        """Copy the state as it is after the step just made. Collective."""
        with spans.during(spans.CHECKPOINT, "copy into memory", f"step {progress.step}"):
            records.sync()
            self._copies.save(progress, records.head)

    def end(self) -> None:
        """Remove them: all that they are for is in a checkpoint. Collective."""
        if self._every is not None:
            self._copies.remove()


def neighbours_of(world: World, nodes: list[int]) -> Neighbours | None:
    """What carries copies to other hosts; None for a lone rank. Collective."""
    if world.size == 1:
        return None
    return Neighbours(world.mpi.COMM_WORLD, ring(nodes, world.rank), world.meter)


def run_of(config: Config, description: Description) -> str:
    """What the copies of a run are called by: its folder, and the settings that make it what it is."""
    out = Path(os.path.realpath(config.out))
    number = out.stat().st_ino if out.exists() else 0  # containers have folders of one name
    said = json.dumps([str(out), number, dict(description.settings)], sort_keys=True)
    return hashlib.sha256(said.encode(errors="surrogateescape")).hexdigest()[:16]


def why_unknown(proof: Path, record: CopyRecord) -> str:
    """Why copies are not of the run in a folder, or an empty text."""
    step = record.progress.step
    if knows(proof, record.chain, step):
        return ""
    return f"those of step {step} are not of the history that {proof} tells"


def no_room(every: int | None, needed: int, free: int, host: str, place: Path = PLACE) -> str:
    """Why copies that need so many bytes of a host cannot be, or an empty text."""
    if needed <= free:
        return ""
    return (
        f"--peer-checkpoint {every}: the copies take {size(needed)} of shared memory on {host}, and {place} "
        f"has {size(max(0, free))} for them: give it more room (containers: --shm-size), take more hosts, or "
        "leave --peer-checkpoint out"
    )


def room_in(place: Path, run: str) -> tuple[int, str]:
    """Bytes of shared memory that copies of a run can have, those that it has included; and the host."""
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        free = 0
    return free + held(ours(run, place)), platform.node()
