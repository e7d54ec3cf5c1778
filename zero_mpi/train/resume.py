"""Chooses the checkpoint that a run resumes from, and checks that it belongs to the run.

`--resume auto` takes the newest checkpoint whose files are valid, and reports which checkpoints it skipped,
and why. A checkpoint of another run (other model, corpus, or value of a `fixed` flag) is an error and is
not skipped, because the user wants neither an older checkpoint nor a new start.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.sound import CheckpointFiles, check_digests, open_checkpoint
from zero_mpi.checkpoint.state import Description, read_json, read_progress
from zero_mpi.config.bounds import check
from zero_mpi.config.inputs import SIZES, fingerprint, kinds_of_data
from zero_mpi.config.optimizer import ADAMW, schedule_of
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.config.toml import checked_type
from zero_mpi.data import Tokenizer, holds_token_files, tokenizer_from_metadata
from zero_mpi.data.conversations.chat_template import DAY, asks_day
from zero_mpi.data.packing import NONE
from zero_mpi.data.tokenizers.byte import ALWAYS, AUTO, NEVER, PLAIN, bos_of
from zero_mpi.data.tokenizers.huggingface_rules import RULES
from zero_mpi.environment.portable import NATIVE
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import is_folder
from zero_mpi.launch.world import World
from zero_mpi.telemetry.log import Caution
from zero_mpi.train.description import changes

CORPUS = "the training data (--data, --val-data, --chat-template and its flags; sha256)"
JUMP = 1.2  # warn if the next rate is larger or smaller than the planned rate by more than this factor
# Values that settings had before checkpoints stored them.
SINCE: dict[str, Any] = {
    "control_tokens": PLAIN,
    "packing": NONE,
    "bits": NATIVE,
    "bos": NEVER,
    "optimizer": ADAMW,
}
SINCE |= {
    name: field.default
    for name, field in FIELDS.items()
    if field.metadata["group"] == "loss" and name != "teacher"
}


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from, with the indices of its tensors."""

    folder: Path
    files: CheckpointFiles

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run. Settings that older checkpoints do not store are added."""
        return {**SINCE, **read_json(self.files.state, "training.settings")}


def find_checkpoint(world: World, config: Config, out: Path, notes: list[str]) -> ResumePoint | None:
    """Return the checkpoint to resume from, or None. Raise UsageError if none is usable. Collective.

    A note for each skipped checkpoint is added to `notes`. Rank 0 lists the folders. Each rank checks a part
    of a checkpoint's bytes, so the ranks agree on the result for each checkpoint that is tried.
    """
    faults: list[str] = []
    for folder in world.run_on_root(lambda: resumable_folders(config, out)):
        try:
            point: ResumePoint = world.run_on_all(partial(open_checked, folder, world))
        except UsageError as error:
            faults.append(str(error))
            continue
        notes += [Caution(f"skipped an unusable checkpoint: {text}") for text in faults]
        return point
    if faults:
        suffix = f" (and {len(faults) - 1} older ones cannot be used either)" if len(faults) > 1 else ""
        raise UsageError(f"{faults[0]}{suffix}; use --resume DIR with another checkpoint, or --resume never")
    return None


def resumable_folders(config: Config, out: Path) -> list[Path]:
    """Return the folders to resume from, in the order to try. A real run also removes interrupted saves.

    Links are followed. If links form a circle, the path is returned unchanged.
    """
    if not config.dry_run:
        folders.clean(out)
    if config.resume == "never":
        return []
    if config.resume == "auto":
        return [Path(os.path.realpath(folder)) for folder in folders.candidates(out)]
    if not is_folder(Path(config.resume)):
        raise UsageError(f"--resume {shown(config.resume)}: no such folder; expected auto, never or a folder")
    return [Path(os.path.realpath(config.resume))]


def open_checked(folder: Path, world: World) -> ResumePoint:
    """Open a checkpoint; check indices and this rank's share of bytes. Raise UsageError if it is damaged."""
    if not os.path.isdir(folder):  # Path.is_dir raises if a name is too long
        link = shown(folder.parent / folders.LATEST)
        raise UsageError(f"{link} points to {shown(folder.name)}, which does not exist")
    point = ResumePoint(folder, open_checkpoint(folder))
    check_digests(point.files, world.rank, world.size, world.meter.beat)
    return point


def original_config(config: Config, point: ResumePoint | None) -> Config:
    """Return the configuration, with the checkpoint's values for settings that no flag gives.

    Defaults may change between versions, or depend on the data. Raises UsageError for an unusable value.
    """
    if point is None:
        return config
    facts = point.settings | read_json(point.files.state, "training.plan")
    names = config.default_names & facts.keys()
    values = {name: checked_type(point.folder, name, facts[name]) for name in names}
    begun: Config = replace(config, **values)
    begun.removed = config.removed
    check(begun)
    return begun


def check_resume(point: ResumePoint, description: Description) -> None:
    """Raise UsageError, with the first difference, if the checkpoint belongs to another run."""
    for key, was, now in differences(point.settings, description.settings):
        label = CORPUS if key == "corpus" else shown(key if "." in key else spelled(key))
        size = next((f" ({spelled(name)})" for name, size in SIZES.items() if key == f"model.{size}"), "")
        raise UsageError(
            f"{shown(point.folder)} is a checkpoint of another run: {label} was {shown(was)}, "
            f"now {shown(now)}{size}; use the same value, another --out, or --resume never"
        )


def original_tokenizer(tokenizer: Tokenizer | None, digest: str | None) -> Tokenizer | None:
    """Return the tokenizer with which the run began; zero_mpi 0.1.0 ignored some Hugging Face rules."""
    if tokenizer is None or digest is None or RULES not in (keys := tokenizer.metadata()):
        return tokenizer
    plain = tokenizer_from_metadata({key: value for key, value in keys.items() if key != RULES})
    return plain if digest == fingerprint(plain) else tokenizer


def settled_bos(config: Config, tokenizer: Tokenizer | None, point: ResumePoint | None) -> str:
    """Return ALWAYS or NEVER for `--bos`. AUTO follows the resumed run. Token files get NEVER."""
    bos = config.bos if config.bos != AUTO or point is None else point.settings["bos"]
    has_bos = not holds_token_files(config.data) and bos_of(tokenizer, bos) is not None
    return ALWAYS if has_bos else NEVER


def settled_day(config: Config, tokenizer: Tokenizer | None, point: ResumePoint | None) -> str | None:
    """Return `--template-date`, or the day on which the run began; None if no template uses a date."""
    day = config.template_date
    if day or tokenizer is None or not asks_day(tokenizer) or not any(kinds_of_data(config)):
        return day
    if point is None:
        return date.today().isoformat()
    return str(point.settings.get("template_date", DAY))


def changes_since(point: ResumePoint, description: Description) -> Iterator[str]:
    """Yield notes on allowed changes since the checkpoint that affect bits or the remaining steps."""
    yield from map(Caution, changes(read_json(point.files.state, "training.machine"), description.machine))
    plan = {"optimizer": ADAMW} | read_json(point.files.state, "training.plan")  # 0.1.0 had only AdamW
    lines = [
        f"{shown(spelled(key))} was {shown(was)}, now {shown(now)}"
        for key, was, now in differences(plan, description.plan)
    ]
    if lines:
        yield f"changed since the checkpoint: {'; '.join(lines)}"


def jumps_of_rate(point: ResumePoint, config: Config) -> Iterator[Caution]:
    """Yield a warning if the next rate is far from the last one and from what the checkpoint planned."""
    step, plan = read_progress(point.files.state).step, read_json(point.files.state, "training.plan")
    settings: dict[str, Any] = {name: plan[name] for name in config.plan() if name in plan}
    settings |= {name: checked_type(point.folder, name, x) for name, x in settings.items() if x is not None}
    begun = replace(config, **settings)
    try:
        check(begun)
    except UsageError:  # current flags, such as --trace-steps, may contradict the old plan
        return
    schedule, rate = schedule_of(begun), schedule_of(config)(step)
    last = schedule(max(0, step - 1))
    if step < config.steps and all(max(rate, x) > JUMP * min(rate, x) for x in (last, schedule(step))):
        yield Caution(
            f"the learning rate jumps from {last:.3g} at step {step} to {rate:.3g} at step {step + 1}, "
            "because the schedule differs from the checkpoint's; to keep the rate, use --schedule constant "
            f"--lr {last:.3g}"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, before, now) for each key whose value differs, in the order of `now`."""
    for key in [*now, *(key for key in before if key not in now)]:
        if before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)
