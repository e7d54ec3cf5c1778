"""The numbers of a record by tags, the same for all trackers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TAGS = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "mfu", "wait_seconds", "sent_bytes")
OF_RANKS = ("memory_bytes", "micro_batch_seconds")
MOST_RANKS = 16  # who have tags of their own; of more there is the largest figure only


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values of a record."""
    for tag in TAGS:
        if tag in record:
            yield tag, record[tag]
    for tag in OF_RANKS:
        figures = {rank: value for rank, value in enumerate(record.get(tag, [])) if value is not None}
        if figures:
            yield f"{tag}/largest", max(figures.values())
        for rank, value in figures.items() if len(figures) <= MOST_RANKS else []:
            yield f"{tag}/rank_{rank:02d}", value
