"""Entries of the cache of encoded texts that lie; a run makes one when this module is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import fuzz_conversations
import wild

BEFORE = """
import os
from zero_mpi.data import encoded_cache
encoded_cache.LEAST = 1
os.environ["ZERO_MPI_CACHE"] = "cache"
"""
SIZES = ["--layers", "1", "--dim", "8", "--heads", "1"]
SIZES += ["--context", "128", "--batch-size", "1", "--steps", "1"]
TRAIN = ["-m", "zero_mpi.train", "--tokenizer", "m.gguf", "--chat-template", "t.jinja", "--data", "texts"]
TRAIN += [*SIZES, "--out", "out", "--sample", "0", "--val-fraction", "0", "--save-every", "0"]


def write_texts(folder: Path) -> None:
    """The conversations, their tokenizer and template, and a cache that takes small ones."""
    fuzz_conversations.samples(folder, fuzz_conversations.lines(*fuzz_conversations.FORMS * 20))
    (folder / "texts").mkdir()  # the name of a file, not of a folder, is a part of what an entry is called by
    (folder / "chat.jsonl").rename(folder / "texts" / "chat.jsonl")
    (folder / "before.py").write_text(BEFORE)


def entry() -> dict[str, bytes]:
    """name -> bytes of the files of a cache with one entry."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-cache-"))
    try:
        write_texts(place)
        run = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
        start = [sys.executable, "-c", BEFORE + run, *TRAIN[1:]]
        subprocess.run(start, cwd=place, check=True, capture_output=True)
        return {
            str(p.relative_to(place)): p.read_bytes() for p in (place / "cache").rglob("*") if p.is_file()
        }
    finally:
        shutil.rmtree(place)


ENTRY = entry()


def write(folder: Path) -> dict[str, Path]:
    """Everything, sound; the files of the entry by their names."""
    write_texts(folder)
    for name, raw in ENTRY.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return {Path(name).name: folder / name for name in ENTRY}


def about(random: Random, folder: Path) -> list[str]:
    """What is known of the documents has other values, keys twice, or is no JSON."""
    path = write(folder)["about.json"]
    content = json.loads(path.read_bytes())
    if random.random() < 0.3:
        path.write_bytes(wild.broken_json(random, content))
        return TRAIN
    found = wild.changed_json(random, content)
    if random.random() < 0.3 and isinstance(found.get("documents"), list):
        found["documents"] = found["documents"] * random.choice([0, 2, 100])
    path.write_bytes(wild.as_text(found, random))
    return TRAIN


def arrays(random: Random, folder: Path) -> list[str]:
    """Ids, or marks of what counts, that are others, fewer or more."""
    files = write(folder)
    path = random.choice([path for name, path in files.items() if name != "about.json"])
    raw = path.read_bytes()
    changes = (
        lambda: wild.edited(random, raw),
        lambda: b"\xff" * len(raw),
        lambda: raw[: random.randrange(len(raw))],
        lambda: raw * random.choice([2, 1000]),
    )
    path.write_bytes(random.choice(changes)())
    if random.random() < 0.2:
        os.truncate(path, 8 << 30)
    return TRAIN


def places(random: Random, folder: Path) -> list[str]:
    """Something else in the place of a file, of the entry or of the cache."""
    path = random.choice([*write(folder).values()])
    chosen = random.choice([path, path, path.parent, path.parent.parent])
    if chosen != path:
        shutil.rmtree(chosen)
    wild.special(random, chosen)
    return TRAIN


def sound(random: Random, folder: Path) -> list[str]:
    write(folder)
    return TRAIN


CASES = {"sound": sound, "about": about, "arrays": arrays, "places": places}
