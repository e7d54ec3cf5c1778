"""Where checkpoints lie, and how a new one appears: whole and durable, or not at all.

    OUT/step-00000100/model.gguf, optimizer.gguf      OUT/latest -> step-00000100, OUT/best -> step-00000060

and ema.gguf where a run keeps a moving average.

A checkpoint is written into a temporary folder beside its place; files and folder are brought to disk, then
one rename makes it visible, and `latest` is replaced by another. Whatever moment a process is killed at, what
`latest` names is complete. These functions are for one rank.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from pathlib import Path

from zero_mpi.files.open import exists

MODEL, ADAPTER, OPTIMIZER = "model.gguf", "adapter.gguf", "optimizer.gguf"
AVERAGE = "ema.gguf"  # of the model, or of adapters
LATEST, BEST = "latest", "best"
STEP_FOLDER = re.compile(r"step-(\d{8,})")
LEFT_BEHIND = re.compile(r"\.step-\d{8,}\.(partial|old)|\.(latest|best)\.partial")
AT_FDCWD, EXCHANGE = -100, 2  # of Linux's renameat2


def weights_in(folder: Path) -> Path:
    """The file of a checkpoint with its weights: the model, or what was trained beside one."""
    adapter = folder / ADAPTER
    return adapter if exists(adapter) else folder / MODEL


def step_folder(out: Path, step: int) -> Path:
    """The folder of a step, such as OUT/step-00000100."""
    return out / f"step-{step:08d}"


def begin(out: Path, step: int) -> Path:
    """An empty temporary folder for the checkpoint of `step`; what an earlier attempt left is removed."""
    return begin_beside(step_folder(out, step))


def beside(final: Path) -> Path:
    """Where a checkpoint is written that will be called `final`."""
    return final.with_name(f".{final.name}.partial")


def begin_beside(final: Path) -> Path:
    """An empty temporary folder for what will be called `final`; an earlier attempt's is removed."""
    folder = beside(final)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def publish(out: Path, step: int, folder: Path, keep: int, is_best: bool = False) -> Path:
    """Give a complete temporary folder its name, point `latest` to it, and remove what is older than `keep`.

    A checkpoint of the same step is replaced. `keep` 0 keeps all. Nothing is removed before the new one and
    the link to it are on disk. `is_best`: `best` is pointed to it as well.
    """
    final = step_folder(out, step)
    put(folder, final)
    for name in (LATEST, *([BEST] * is_best)):
        point(out, name, final.name)
    remove_old(out, step, keep)
    clean(out)
    return final


def put(folder: Path, final: Path) -> None:
    """Give a complete folder its name, also where another one has it, and bring that to disk."""
    sync_folder(folder)
    if final.exists():
        replace_folder(folder, final)
    else:
        folder.rename(final)
    sync_folder(final.parent)


def publish_alone(final: Path) -> None:
    """Give what was written beside `final` its name; what had it before is removed."""
    put(beside(final), final)
    for left in (beside(final), moved_aside(final)):
        shutil.rmtree(left, ignore_errors=True)


def restore(final: Path) -> None:
    """Give a checkpoint its name back that was moved aside for one which never took its place."""
    if moved_aside(final).exists() and not final.exists():
        moved_aside(final).rename(final)


def moved_aside(final: Path) -> Path:
    """Where the checkpoint that is called `final` waits for another to take its place."""
    return final.with_name(f".{final.name}.old")


def replace_folder(folder: Path, final: Path) -> None:
    """Put `folder` in the place of `final` without a moment in which there is neither."""
    if exchange(folder, final):
        return  # `folder` is now the old one's name; `clean` removes it
    old = moved_aside(final)
    shutil.rmtree(old, ignore_errors=True)
    final.rename(old)
    try:
        folder.rename(final)
    except OSError:
        old.rename(final)
        raise


def exchange(first: Path, second: Path) -> bool:
    """Let two folders change names in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def point_best(out: Path, step: int) -> None:
    """Let OUT/best name the checkpoint of `step`; of step 0 there is none, and no link."""
    name = step_folder(out, step).name if step else ""
    if name and named(out, BEST) != name:
        point(out, BEST, name)
    elif not name and (out / BEST).is_symlink():
        (out / BEST).unlink()


def named(out: Path, link: str) -> str:
    """The name that a link in OUT holds; empty where there is no link."""
    return os.readlink(out / link) if (out / link).is_symlink() else ""


def point(out: Path, which: str, name: str) -> None:
    """Replace the symbolic link OUT/latest or OUT/best in one step."""
    link = out / f".{which}.partial"
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(name)
    except OSError as error:
        error.filename = str(link)  # the system's error names what the link points to
        raise
    link.replace(out / which)
    sync_folder(out)


def remove_old(out: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and the best one; 0 keeps all.

    Later ones are of a run that this one started over or went back in: they are not ours to remove.
    """
    so_far = [folder for number, folder in steps(out) if number <= step]
    for folder in so_far[:-keep] if keep else []:
        if folder.name != named(out, BEST):
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint; renamed first, so that one half removed is not taken for a checkpoint."""
    old = moved_aside(folder)
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


def clean(out: Path) -> None:
    """Remove what interrupted saves and removals left behind.

    A checkpoint that was moved aside for a new one which never took its place gets its name back.
    """
    for entry in list(out.iterdir()) if out.is_dir() else []:
        if not LEFT_BEHIND.fullmatch(entry.name):
            continue
        final = entry.with_name(entry.name[1:].removesuffix(".old"))
        wanted = final.name in (named(out, LATEST), named(out, BEST))
        if entry.name.endswith(".old") and wanted and not final.exists():
            entry.rename(final)
        elif entry.is_symlink():
            entry.unlink()
        else:
            shutil.rmtree(entry, ignore_errors=True)


def steps(out: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints in OUT, oldest first."""
    try:
        entries = list(out.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # also where it is moved at this moment
        return []
    found = [(match, entry) for entry in entries if (match := STEP_FOLDER.fullmatch(entry.name))]
    return sorted(
        (int(match[1]), entry) for match, entry in found if not entry.is_symlink() and entry.is_dir()
    )


def candidates(out: Path) -> list[Path]:
    """Folders to go on from, the best first: what `latest` names, then older ones, the newest of them first.

    A later step goes before it if it was also written later: the link was not replaced any more. Other later
    ones are of a run that was given up. Without a usable link the highest step counts.
    """
    link, found = out / LATEST, steps(out)[::-1]
    if not link.is_symlink() and not link.exists():
        return [folder for _, folder in found]
    target = Path(os.path.realpath(link))  # Path.resolve raises where links go in a circle
    match = STEP_FOLDER.fullmatch(target.name)
    if target.parent != Path(os.path.realpath(out)) or not match:
        return [link, *(folder for _, folder in found)]
    latest, written = int(match[1]), written_at(target)
    later = [folder for step, folder in found if step > latest and written < written_at(folder)]
    return [*later, out / target.name, *(folder for step, folder in found if step < latest)]


def written_at(folder: Path) -> int:
    """When a checkpoint's last file was written, in ns; 0 if there is none."""
    try:
        return (folder / OPTIMIZER).stat().st_mtime_ns
    except OSError:
        return 0


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk. OSError with its name."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        error.filename = str(folder)  # the system names no file where it is given a handle
        raise
    finally:
        os.close(handle)
