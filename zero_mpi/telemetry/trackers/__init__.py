"""Where else the records of a run go: a module for each tracker, and the table of them.

The setting of a module's name is what is wished of it; nothing is where it is empty. A module has
`check(wish)`, which raises UsageError where it cannot work here, and `begin(run, wish)`, which returns a
`tracker.Tracker`. All are given the records of `metrics.jsonl` as they are; `tags.numbers` makes tags and
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
    """What the settings of a run ask of which tracker."""
    return {name: getattr(config, name) for name in TABLE if getattr(config, name)}


def check(config: object) -> None:
    """Raise UsageError where a tracker that is asked for cannot work here."""
    for name, wish in wishes(config).items():
        TABLE[name].check(wish)


def begin(config: object, run: TrackedJob) -> list[Tracker]:
    """The trackers of a job that begins. Raises JobError or OSError where one cannot."""
    return [TABLE[name].begin(run, wish) for name, wish in wishes(config).items()]
