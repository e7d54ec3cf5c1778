"""Converts `--epochs` to steps, once the amount of data is known, and gives notes on flags at the start.

From then on the run has that number of `--steps`: records, checkpoints and OUT/config.toml use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zero_mpi import environment
from zero_mpi.config.bounds import check
from zero_mpi.config.conflicts import FlagContext, without_effect
from zero_mpi.config.settings import ANY, FURTHER, STEPS, Config
from zero_mpi.data import named
from zero_mpi.errors import UsageError
from zero_mpi.telemetry.log import Caution

MANY_EPOCHS = 10


def in_steps(config: Config, windows: int) -> Config:
    """Return the configuration with its epochs, if any, converted to steps; `windows`: windows in the data.

    Each window is seen at least so many times: the last step may begin the next epoch. Raises UsageError for
    flags that do not fit the number of steps.
    """
    if config.epochs is None:
        return replace(config, **STEPS) if config.steps is None else config
    counted = replace(config, steps=-(-config.epochs * windows // config.batch_size), epochs=None)
    try:
        check(counted)
    except UsageError as error:
        raise UsageError(f"{error} (--epochs {config.epochs} are {counted.steps} steps)") from None
    return counted


def cautions(config: Config, epochs: float) -> Iterator[str]:
    """Yield warnings on the length of a run whose steps read the data so many times."""
    if config.steps <= 2 * config.warmup > 2:
        yield (
            f"--warmup {config.warmup} takes half of --steps {config.steps} or more, at rates below --lr "
            f"{config.lr:g}; try --warmup {ANY['warmup']}"
        )
    if epochs > MANY_EPOCHS:
        yield f"--steps {config.steps} reads the data {epochs:.1f} times; try --epochs 3, or add data"


def remarks(config: Config, is_text: bool, are_ids: bool = False) -> Iterator[str]:
    """Yield notes on a configuration. `is_text`, `are_ids`: as `FlagContext` has them."""
    if config.removed:
        yield f"--config: removed settings have no effect: {', '.join(config.removed)}"
    if config.init is not None and config.lora is None and config.lr == FURTHER["lr"]:
        yield f"--lr {config.lr:g}: the default for pretrained weights (--init)"
    if config.init is not None and not config.data:
        yield Caution(f"--init without --data: training on {named(config.data)}; use --data for other text")
    yield from map(Caution, without_effect(FlagContext(config, is_text, are_ids)))
    for variable in environment.crowded():
        yield Caution(f"{variable}: this rank has {cores()}; more threads only compete for them")


def threads_within(wanted: int | None) -> int | None:
    """Return `wanted` if this rank has that many cores; else raise UsageError."""
    if wanted is not None and wanted > environment.cores():
        raise UsageError(
            f"--threads {wanted}: this rank has {cores()}: use fewer threads or auto, or bind each rank to "
            f"more cores: {environment.binding(wanted)}"
        )
    return wanted


def cores() -> str:
    """Return the number of cores that this process may run on, in words."""
    count = environment.cores()
    return f"{count} core{'s' * (count > 1)}"
