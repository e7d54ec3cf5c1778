"""`--wandb PROJECT`: the records of a run at Weights & Biases; with WANDB_MODE=offline in a folder below OUT.

Each job of a run is a separate run there, in a group with the name of OUT: the server cannot discard the
steps that a resume repeats. Records go through the library's own process, so no step waits for a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_mpi.errors import import_optional
from zero_mpi.telemetry.trackers.tracker import Guarded, TrackedJob, numbers


def check(wish: str) -> Any:
    """Return the library. Raises UsageError where it is not installed."""
    return import_optional("--wandb", "wandb", "wandb")


def begin(run: TrackedJob, wish: str) -> Guarded:
    """Return the run of a job in the project `wish`."""
    return Guarded("--wandb", lambda: Project(run, wish))


class Project:
    """W&B run in a project. Raises the errors of the library."""

    def __init__(self, run: TrackedJob, project: str) -> None:
        wandb = check(project)
        # The terminal and its output stay the run's own, and the run measures machines itself.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._run = wandb.init(
            project=project,
            group=run.out.name,
            name=f"{run.out.name} from step {run.done}",
            dir=str(run.out),
            config=dict(run.settings),
            settings=settings,
        )

    def step(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(numbers(record)), step=record["step"])

    def close(self) -> None:
        """End the run there; pending records are sent first."""
        self._run.finish()
