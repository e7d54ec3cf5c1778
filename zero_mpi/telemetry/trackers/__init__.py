"""Trackers, other places for the records of a run: a module for each tracker, and the table of them.

The setting with a module's name is passed to it as `wish`; empty: the tracker is off. A module has
`check(wish)`, which raises UsageError if it cannot work here, and `begin(run, wish)`, which returns a
`tracker.Tracker`. All get the records of `metrics.jsonl` as they are; `tags.numbers` makes tags and
numbers of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from zero_mpi.telemetry.trackers import mlflow, prometheus, tensorboard, wandb
from zero_mpi.telemetry.trackers.tracker import TrackedJob, Tracker

TABLE: Mapping[str, ModuleType] = {
    "tensorboard": tensorboard,
    "prometheus": prometheus,
    "wandb": wandb,
    "mlflow": mlflow,
}


def wishes(config: object) -> dict[str, Any]:
    """Return the trackers that the settings of a run ask for, and their settings."""
    return {name: getattr(config, name) for name in TABLE if getattr(config, name)}


def check(config: object) -> None:
    """Raise UsageError if a requested tracker cannot work here."""
    for name, wish in wishes(config).items():
        TABLE[name].check(wish)


def begin(config: object, run: TrackedJob) -> list[Tracker]:
    """Return the trackers of a job that begins. Raises JobError or OSError if one cannot begin."""
    return [TABLE[name].begin(run, wish) for name, wish in wishes(config).items()]
