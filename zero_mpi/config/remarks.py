"""What is said at the start about flags and variables whose effect may not be the one that was meant."""

from __future__ import annotations

from collections.abc import Iterator

from zero_mpi import environment
from zero_mpi.config.conflicts import FlagContext, without_effect
from zero_mpi.config.defaults import FURTHER
from zero_mpi.config.settings import Config
from zero_mpi.data import named
from zero_mpi.errors import UsageError
from zero_mpi.telemetry.log import Caution


def remarks(config: Config, is_text: bool, are_ids: bool = False) -> Iterator[str]:
    """Notes on a configuration. `is_text`, `are_ids`: as `FlagContext` has them."""
    if config.removed:
        yield f"--config: without effect, for they were removed: {', '.join(config.removed)}"
    if config.init is not None and config.lora is None and config.lr == FURTHER["lr"]:
        yield f"--lr {config.lr:g}: the default with --init, for weights that are trained already"
    if config.init is not None and not config.data:
        yield Caution(
            f"--init without --data: trains the model on {named(config.data)}; --data names other text"
        )
    yield from map(Caution, without_effect(FlagContext(config, is_text, are_ids)))
    for variable in environment.crowded():
        yield Caution(f"{variable}: this rank may run on {cores()}, more threads only take turns on them")


def threads_within(wanted: int | None) -> int | None:
    """`wanted`, if it is no more than this rank has cores; raises UsageError."""
    if wanted is not None and wanted > environment.cores():
        raise UsageError(
            f"--threads {wanted}: this rank may run on {cores()}: give as many or less, or auto, or bind "
            f"each rank to more cores: {environment.binding(wanted)}"
        )
    return wanted


def cores() -> str:
    """How many this process may run on."""
    count = environment.cores()
    return f"{count} core{'s' * (count > 1)}"
