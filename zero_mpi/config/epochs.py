"""`--epochs`: the steps that go so many times through the data, once it is known how much there is.

From then on the run is one of so many `--steps`: records, checkpoints and OUT/config.toml say that number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zero_mpi.config.bounds import check
from zero_mpi.config.conflicts import unreached
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.telemetry.log import Caution

RIVALS = {"steps", "epochs"}  # settings that say the same


def in_steps(config: Config, windows: int) -> Config:
    """The configuration with the steps that its epochs are, where it has any; `windows` in the data.

    Each window is seen so many times at least: the last step may begin the next epoch. Raises UsageError for
    flags that do not fit the number of steps.
    """
    if config.epochs is None:
        return config
    counted = replace(config, steps=-(-config.epochs * windows // config.batch_size), epochs=None)
    try:
        check(counted)
    except UsageError as error:
        raise UsageError(f"{error} (--epochs {config.epochs} are {counted.steps} steps)") from None
    return counted


def told(config: Config, windows: int) -> Iterator[str]:
    """What is said of epochs at the start, before they are steps."""
    if config.epochs is None:
        return
    counted = in_steps(config, windows)
    more = counted.steps * config.batch_size - config.epochs * windows
    rest = f"; the last step takes {more:,} of the next epoch" if more else ""
    yield (
        f"--epochs {config.epochs}: {counted.steps:,} steps of {config.batch_size:,} windows, for "
        f"{config.epochs:,} x {windows:,} windows of {config.context:,} tokens{rest}"
    )
    yield from map(Caution, unreached(counted))
