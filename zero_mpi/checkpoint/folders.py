"""Layout of checkpoint folders. A new checkpoint gets its final name once it is complete and on disk.

    OUT/step-00000100/model.gguf, optimizer.gguf      OUT/latest -> step-00000100, OUT/best -> step-00000060

If a run keeps a moving average, the folder of a step also has ema.gguf.

A checkpoint is written into a temporary folder next to its target. Its files and the folder are fsynced, then
a rename makes the checkpoint visible, and a second rename replaces `latest`. So the checkpoint that `latest`
names is complete even if the process is killed at any moment. Only rank 0 calls functions that change files.
"""

import ctypes
import errno
import os
import re
import shutil
from pathlib import Path

from zero_mpi.errors import naming
from zero_mpi.files.atomic import partial_of
from zero_mpi.files.open import exists
from zero_mpi.telemetry import metrics

MODEL, ADAPTER, OPTIMIZER = "model.gguf", "adapter.gguf", "optimizer.gguf"
AVERAGE = "ema.gguf"  # moving average of the model, or of adapters
LATEST, BEST = "latest", "best"
STEP_FOLDER = re.compile(r"step-(\d{8,})")
LEFT_BEHIND = re.compile(r"\.step-\d{8,}\.(partial|old)|\.(latest|best)\.partial")
AT_FDCWD, EXCHANGE = -100, 2  # constants of Linux's renameat2


def weights_in(folder: Path) -> Path:
    adapter = folder / ADAPTER
    return adapter if exists(adapter) else folder / MODEL


def step_folder(out: Path, step: int) -> Path:
    return out / f"step-{step:08d}"


def remove_tree(folder: Path) -> None:
    """Remove as much of a folder as possible. Ignore other files: on a pipe, `shutil.rmtree` would hang."""
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def begin(final: Path) -> Path:
    """Make an empty temporary folder for the checkpoint `final`. Remove what an earlier attempt left."""
    folder = partial_of(final)
    remove_tree(folder)
    folder.mkdir()
    return folder


def publish(out: Path, step: int, folder: Path, keep: int, is_best: bool = False) -> Path:
    """Give a complete temporary folder its final name, point `latest` to it, and remove old checkpoints.

    A checkpoint of the same step is replaced. The newest `keep` checkpoints and the best one stay; 0 keeps
    all. Nothing is removed before the new checkpoint and the link are on disk. If `is_best`, point `best` to
    it too.
    """
    final = step_folder(out, step)
    put(folder, final)
    for name in (LATEST, *([BEST] * is_best)):
        point(out, name, final.name)
    remove_old(out, step, keep)
    clean(out)
    return final


def put(folder: Path, final: Path) -> None:
    """Rename a complete folder to `final`, replacing a folder of that name, and flush the rename to disk."""
    sync_folder(folder)
    if final.exists():
        replace_folder(folder, final)
    else:
        folder.rename(final)
    sync_folder(final.parent)


def moved_aside(final: Path) -> Path:
    """Return the path that the old checkpoint `final` has while it is replaced or removed."""
    return final.with_name(f".{final.name}.old")


def replace_folder(folder: Path, final: Path) -> None:
    """Replace the folder `final` by `folder`. At every moment `final` exists, or `clean` can restore it."""
    if exchange(folder, final):
        return  # `folder` now names the old checkpoint; `clean` removes it
    old = moved_aside(final)
    remove_tree(old)
    final.rename(old)
    try:
        folder.rename(final)
    except OSError:
        old.rename(final)
        raise


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders atomically. Return False if the system does not support this."""
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
    """Point the link OUT/best to the checkpoint of `step`; remove the link if `step` is 0."""
    name = step_folder(out, step).name if step else ""
    if name and link_target(out, BEST) != name:
        point(out, BEST, name)
    elif not name and (out / BEST).is_symlink():
        (out / BEST).unlink()


def link_target(out: Path, link: str) -> str:
    """Return the target of a link in OUT; "" if there is no such link."""
    return os.readlink(out / link) if (out / link).is_symlink() else ""


def point(out: Path, link: str, name: str) -> None:
    """Replace the symbolic link OUT/latest or OUT/best atomically. `name`: the new target."""
    partial = out / f".{link}.partial"
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(name)
    except OSError as error:
        error.filename = str(partial)  # the system's error names the link's target instead
        raise
    partial.replace(out / link)
    sync_folder(out)


def remove_old(out: Path, step: int, keep: int) -> None:
    """Remove checkpoints up to `step`, except the newest `keep` and the best one; `keep` 0 keeps all.

    Checkpoints of later steps stay. They belong to a run that was restarted, or resumed from an earlier step.
    """
    folders = [folder for number, folder in steps(out) if number <= step]
    for folder in folders[:-keep] if keep else []:
        if folder.name != link_target(out, BEST):
            remove(folder)


def remove(folder: Path) -> None:
    """Rename a checkpoint before removing it, so that a half-removed folder never looks like a checkpoint."""
    old = moved_aside(folder)
    remove_tree(old)
    folder.rename(old)
    shutil.rmtree(old)


def entries(out: Path) -> list[Path]:
    """Return the entries of a run's folder; [] if it is missing or is not a folder."""
    try:
        return list(out.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def clean(out: Path) -> None:
    """Remove what interrupted saves and removals left in OUT. A checkpoint that was moved aside gets its name
    back if `latest` or `best` names it and no other checkpoint has replaced it."""
    for entry in entries(out):
        if not LEFT_BEHIND.fullmatch(entry.name):
            continue
        final = entry.with_name(entry.name[1:].removesuffix(".old"))
        linked = final.name in (link_target(out, LATEST), link_target(out, BEST))
        if entry.name.endswith(".old") and linked and not final.exists():
            entry.rename(final)
        elif entry.is_symlink():
            entry.unlink()
        else:
            remove_tree(entry)


def steps(out: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the checkpoints in OUT, in ascending order of steps."""
    matches = [(match, entry) for entry in entries(out) if (match := STEP_FOLDER.fullmatch(entry.name))]
    return sorted(
        (int(match[1]), entry) for match, entry in matches if not entry.is_symlink() and entry.is_dir()
    )


def candidates(out: Path) -> list[Path]:
    """Return the checkpoints to resume from, in the order to try them: `latest`, then earlier steps.

    A later step that was written after `latest`, and that has a record, comes first: its job ended before it
    could move the link. Other later steps are left out: they belong to an abandoned run. Without a link, all
    steps are returned, the highest first. If the link does not name a checkpoint in OUT, it comes before all
    steps.
    """
    link, checkpoints = out / LATEST, steps(out)[::-1]
    if not link.is_symlink() and not link.exists():
        return [folder for _, folder in checkpoints]
    target = Path(os.path.realpath(link))  # Path.resolve raises an error for a circle of links
    match = STEP_FOLDER.fullmatch(target.name)
    if target.parent != Path(os.path.realpath(out)) or not match:
        return [link, *(folder for _, folder in checkpoints)]
    latest, time = int(match[1]), written_at(target)
    last = metrics.last_step(out / metrics.METRICS)  # in a copied folder, file times do not show the order
    later = [folder for step, folder in checkpoints if latest < step <= last and time < written_at(folder)]
    return [*later, out / target.name, *(folder for step, folder in checkpoints if step < latest)]


def written_at(folder: Path) -> int:
    """Return the time in ns at which a checkpoint's last file, optimizer.gguf, was written; 0 if missing."""
    try:
        return (folder / OPTIMIZER).stat().st_mtime_ns
    except OSError:
        return 0


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk. An OSError names the folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(folder):
            os.fsync(handle)
    finally:
        os.close(handle)
