"""Copies in memory whose records or elements lie: noise, other types with a checksum that fits, other files.

They are looked for and taken up as a run does it, by a script: a run looks in /dev/shm alone.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random

import tiny
import wild
from xxhash import xxh3_128_hexdigest

from zero_mpi import GradAccum, SerialComm, ShardedAdamW
from zero_mpi.checkpoint.copy_file import RECORD, CopyPlace
from zero_mpi.checkpoint.peer_copies import PeerCopies
from zero_mpi.checkpoint.state import Description, TrainingProgress

CONFIG = tiny.MODELS["gpt2 tied"]
DESCRIPTION = Description("gpt2", CONFIG.metadata(), {}, {"threads": 1, "numpy": "2"}, {"lr": 0.1})
SCRIPT = """
import sys
from pathlib import Path

import fuzz_copies
import tiny

from zero_mpi import SerialComm, ShardedAdamW
from zero_mpi.checkpoint.copy_search import find_copies, load_copies
from zero_mpi.errors import UsageError
from zero_mpi.session.resume import changes_between

comm, faults = SerialComm(), []
optimizer = ShardedAdamW(tiny.make(comm, fuzz_copies.CONFIG))
try:
    found = find_copies(comm, "ab", (0, 1), Path("memory"), lambda record: "", faults)
    if found is not None:
        load_copies(comm, found, optimizer, fuzz_copies.DESCRIPTION)
        record = found.record
        faults += map(str, changes_between(record.machine, record.plan, fuzz_copies.DESCRIPTION))
        faults += [f"step {found.progress.step}"]
except UsageError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
print(*faults, sep="\\n")
if sys.argv[1:] and faults != ["step 2"]:
    sys.exit(7)
"""


@cache
def copied() -> dict[str, bytes]:
    """The files of two copies of a run of one rank, by name."""
    comm = SerialComm()
    optimizer = ShardedAdamW(tiny.make(comm, CONFIG))
    accumulator = GradAccum(optimizer.module, 2)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-copies-"))
    try:
        copies = PeerCopies(comm, None, CopyPlace("ab", "01", 0, folder), optimizer, DESCRIPTION)
        for step in (1, 2):
            tiny.run_step(optimizer.module, accumulator, CONFIG, step, 2)
            optimizer.step(max_norm=1.0)
            copies.save(TrainingProgress(step, 32 * step, 0, step, 2), "head")
        copies.close()
        return {path.name: path.read_bytes() for path in folder.iterdir()}
    finally:
        shutil.rmtree(folder)


def write(folder: Path, changed: dict[str, bytes]) -> list[str]:
    """The copies with some files changed, and the command that looks at them."""
    (folder / "memory").mkdir()
    for name, content in (copied() | changed).items():
        (folder / "memory" / name).write_bytes(content)
    (folder / "look.py").write_text(SCRIPT)
    return ["look.py"]


def sound(random: Random, folder: Path) -> list[str]:
    """Nothing is changed: the newest is taken."""
    return [*write(folder, {}), "sound"]


def noise(random: Random, folder: Path) -> list[str]:
    """Bytes changed in any of the files."""
    names = random.sample(sorted(copied()), random.randint(1, len(copied())))
    return write(folder, {name: wild.edited(random, copied()[name]) for name in names})


def types(random: Random, folder: Path) -> list[str]:
    """Values of records swapped, dropped or nested, with checksums that fit."""
    changed = {}
    for name in [name for name in copied() if name.endswith(RECORD)]:
        said = json.loads(copied()[name].partition(b"\n")[2])
        body = wild.as_text(wild.changed_json(random, said), random)
        changed[name] = f"{xxh3_128_hexdigest(body)}\n".encode() + body
    return write(folder, changed)


def special(random: Random, folder: Path) -> list[str]:
    """Something else in the place of a file."""
    command = write(folder, {})
    wild.special(random, folder / "memory" / random.choice(sorted(copied())))
    return command


CASES = {"sound": sound, "noise": noise, "types": types, "special": special}
copied()  # once, before anything is forked
