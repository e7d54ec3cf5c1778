"""Where checkpoints lie, and how a new one appears: whole and durable, or not at all.

    OUT/step-00000100/model.gguf, optimizer.gguf      OUT/latest -> step-00000100

A checkpoint is written into a temporary folder beside its place; files and folder are brought to disk, then
one rename makes it visible, and `latest` is replaced by another. These functions are for one rank.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

MODEL, OPTIMIZER, LATEST = "model.gguf", "optimizer.gguf", "latest"
STEP_FOLDER = re.compile(r"step-(\d{8,})")


def step_folder(out: Path, step: int) -> Path:
    """OUT/step-00000100."""
    return out / f"step-{step:08d}"


def begin(out: Path, step: int) -> Path:
    """An empty temporary folder for the checkpoint of `step`; what an earlier attempt left is removed."""
    folder = out / f".{step_folder(out, step).name}.partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(out: Path, step: int, folder: Path, keep: int) -> Path:
    """Give a complete temporary folder its name, point `latest` to it, and remove what is older than `keep`.

    A checkpoint of the same step is replaced. `keep` 0 keeps all.
    """
    final = step_folder(out, step)
    sync_folder(folder)
    replaced = out / f".{final.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    folder.rename(final)
    sync_folder(out)
    point_latest(out, final.name)
    shutil.rmtree(replaced, ignore_errors=True)
    remove_old(out, step, keep)
    return final


def point_latest(out: Path, name: str) -> None:
    """Replace the symbolic link OUT/latest in one step."""
    link = out / f".{LATEST}.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(out / LATEST)
    sync_folder(out)


def remove_old(out: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`; 0 keeps all.

    Later ones are of a run that this one started over or went back in: they are not ours to remove.
    """
    so_far = [folder for number, folder in steps(out) if number <= step]
    for folder in so_far[:-keep] if keep else []:
        shutil.rmtree(folder)


def steps(out: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints in OUT, oldest first."""
    if not out.is_dir():
        return []
    found = [(STEP_FOLDER.fullmatch(entry.name), entry) for entry in out.iterdir() if entry.is_dir()]
    return sorted((int(match[1]), entry) for match, entry in found if match and not entry.is_symlink())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
