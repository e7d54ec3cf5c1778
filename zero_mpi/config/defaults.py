"""What flags are where nobody gave them, for a model from nothing and for one that is trained further.

A model that comes from a file (`--init`) brings its sizes along: flags may repeat them, and may not differ.
Its weights are near where they should be, so the learning rate of a model from nothing would destroy it.
"""

from __future__ import annotations

from typing import Any

FROM_NOTHING: dict[str, Any] = {"arch": "llama", "layers": 4, "dim": 192, "heads": 6, "lr": 4e-3}
FURTHER: dict[str, Any] = {"lr": 5e-5}  # what is usual for all weights of a language model
ADAPTERS: dict[str, Any] = {"lr": 2e-4}  # and for adapters beside them, which start from nothing
STEPS: dict[str, Any] = {"steps": 440}  # where no epochs are asked for


def defaults(init: str | None, lora: int | None = None) -> dict[str, Any]:
    """The settings that depend on whether the model comes from a file, and on what of it is trained."""
    if init is None:
        return FROM_NOTHING
    return FURTHER if lora is None else ADAPTERS


def told(name: str) -> str:
    """What `--help` says of a setting in the tables above; empty for another."""
    if name not in FROM_NOTHING:
        return ""
    lora = f", with --lora {ADAPTERS[name]}" if name in ADAPTERS else ""
    return f" (default: {FROM_NOTHING[name]}; with --init {FURTHER.get(name, 'that of the model')}{lora})"
