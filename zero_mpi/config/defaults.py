"""What flags are where nobody gave them, for a model from nothing and for one that is trained further.

A model that comes from a file (`--init`) brings its sizes along: flags may repeat them, and may not differ.
Its weights are near where they should be, so the learning rate of a model from nothing would destroy it.
"""

from __future__ import annotations

from typing import Any

FROM_NOTHING: dict[str, Any] = {"arch": "llama", "layers": 4, "dim": 192, "heads": 6, "lr": 4e-3}
FURTHER: dict[str, Any] = {"lr": 5e-5}  # what is usual for all weights of a language model
ADAPTERS: dict[str, Any] = {"lr": 1e-3}  # and for adapters beside them, which start from nothing
LR_TIMES_WIDTH = 0.8  # at most, of adapters: 2e-4 beside a width of 4096, as is usual
LENGTH = {"steps", "epochs"}  # settings that say the same
STEPS: dict[str, Any] = {"steps": 440}  # of a model from nothing, where no epochs are asked for
ANY: dict[str, Any] = {"context": 128, "batch_size": 16, "warmup": "9%"}
EPOCHS, MOST_CONTEXT = 3, 1024  # of conversations
FEW_WINDOWS = 214  # below which a batch of these is smaller, down to 4, so that three epochs are 40 steps


def defaults(init: str | None, lora: int | None = None) -> dict[str, Any]:
    """The settings that depend on whether the model comes from a file, and on what of it is trained."""
    if init is None:
        return FROM_NOTHING
    return FURTHER if lora is None else ADAPTERS


def batch_size(windows: int) -> int:
    """The default for so many windows of conversations; the number of ranks has no part in it."""
    return 16 if windows >= FEW_WINDOWS else 8 if 2 * windows >= FEW_WINDOWS else 4


def told(name: str) -> str:
    """What `--help` says of a setting in the tables above; empty for another."""
    if name in ANY:
        return f" (default: {ANY[name]}{'' if name == 'warmup' else '; with --init by the conversations'})"
    if name not in FROM_NOTHING:
        return ""
    lora = f", with --lora {ADAPTERS[name]} or {LR_TIMES_WIDTH} / width" if name in ADAPTERS else ""
    return f" (default: {FROM_NOTHING[name]}; with --init {FURTHER.get(name, 'that of the model')}{lora})"
