"""Run folders with links, pipes or folders instead of files, and folders that move during a command.

The names come from a resumed run when this module is imported. Files in the folder `outside` must stay
unchanged. A folder moves when the command opens a file in it for the nth time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import fuzz_run_folder
import wild

GOES_ON = [*fuzz_run_folder.TRAIN, "--steps", "6", "--trace", "run/trace.json", "--trace-steps", "5:6"]
TOKENIZE = ["-m", "zero_mpi", "tokenize", "text.txt", "--tokenizer", "byte"]
TOKENIZE += ["--out", "run", "--part-mb", "0.001"]
WATCH = """
import os, sys
seen, hooked = set(), ("open", "os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.rmdir")
def hook(event, arguments):
    if event in hooked:
        texts = [os.fsdecode(text) for text in arguments[:2] if isinstance(text, (str, bytes))]
        seen.update(name for text in texts if (name := os.path.relpath(text)).startswith("run/"))
sys.addaudithook(hook)
"""
TELL = "import atexit; atexit.register(lambda: open('names', 'w').write('\\n'.join(sorted(seen))))"
MOVE = """
import os, shutil, sys
left, how = {left}, {how!r}
def hook(event, arguments):
    global left
    if event not in ("open", "os.rename", "os.mkdir", "os.listdir", "os.scandir") or left < 0:
        return
    path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else ""
    if not os.path.relpath(path or ".").startswith("run"):
        return
    left -= 1
    if left >= 0:
        return
    if how == "gone":
        shutil.rmtree("run", ignore_errors=True)
    elif how in ("away", "another"):
        os.path.exists("run") and os.rename("run", "away")
        how == "another" and shutil.copytree("outside", "run")
    elif os.path.isfile(path):
        os.unlink(path)
        how == "pipe" and os.mkfifo(path)
        how == "folder" and os.mkdir(path)
        how == "link" and os.symlink(os.path.abspath("outside/file"), path)
sys.addaudithook(hook)
"""
MOVES = ("gone", "away", "another", "unlinked", "pipe", "folder", "link")
LINKS = ("link", "hard link", "folder link", "full folder", *wild.SPECIAL)


def names_opened() -> list[str]:
    """Return every name in a run folder that a resumed run or `tokenize` opens, creates or removes."""
    found = set(fuzz_run_folder.RUN)
    for command in (GOES_ON, TOKENIZE):
        place = Path(tempfile.mkdtemp(prefix="fuzz-names-"))
        try:
            fuzz_run_folder.write_run(place)
            if command is TOKENIZE:
                shutil.rmtree(place / "run")
            run = "import runpy; runpy.run_module(sys.argv[0], run_name='__main__')"
            script = "\n".join((WATCH, TELL, f"sys.argv[:] = {command[1:]!r}", run))
            subprocess.run([sys.executable, "-c", script], cwd=place, check=True, capture_output=True)
            found |= {name for name in (place / "names").read_text().split("\n") if name.startswith("run/")}
        finally:
            shutil.rmtree(place)
    return sorted(name for name in found if not re.search("-[0-9a-f]{12}$", name))  # drawn at random


NAMES = names_opened()


def write(folder: Path) -> Path:
    run = fuzz_run_folder.write_run(folder)
    shutil.copytree(run, folder / "outside", symlinks=True)
    (folder / "outside" / "file").write_text("to be left alone\n")
    return run


def put(random: Random, path: Path, kind: str) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.resolve() != path.parent or not path.parent.is_dir():
        return  # the parent is already replaced
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    outside = path.parents[len(path.parts) - path.parts.index("run") - 1] / "outside"
    same = outside.joinpath(*path.parts[path.parts.index("run") + 1 :])
    target = same if same.is_file() and random.random() < 0.7 else outside / "file"
    if kind == "link":
        path.symlink_to(target)
    elif kind == "hard link":
        os.link(target, path)
    elif kind == "folder link":
        path.symlink_to(outside)
    elif kind == "full folder":
        path.mkdir()
        (path / "file").write_text("x")
    else:
        wild.special(random, path, kind)


def command(random: Random) -> list[str]:
    others = [["-m", "zero_mpi", "inspect", "run"], fuzz_run_folder.command(random)]
    return random.choice([GOES_ON, GOES_ON, [*GOES_ON, "--resume", "never"], TOKENIZE, *others])


def links(random: Random, folder: Path) -> list[str]:
    write(folder)
    kinds = random.choice([LINKS, LINKS[:2]])
    for name in random.sample(NAMES, random.choice([1, 2, 6])):
        put(random, (folder / name).absolute(), random.choice(kinds))
    return command(random)


def moved(random: Random, folder: Path) -> list[str]:
    """Remove or replace the folder, or a file in it, between two openings."""
    write(folder)
    chosen = command(random)
    if chosen is TOKENIZE:
        shutil.rmtree(folder / "run")
    hook = MOVE.format(left=random.randrange(random.choice([5, 20, 80])), how=random.choice(MOVES))
    (folder / "before.py").write_text(hook)
    return chosen


def sound(random: Random, folder: Path) -> list[str]:
    write(folder)
    return GOES_ON


CASES = {"sound": sound, "links": links, "moved": moved}
