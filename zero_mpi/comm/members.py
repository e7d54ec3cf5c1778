"""The ranks of each node, found without communication."""

from __future__ import annotations

from collections.abc import Sequence


def members_of(nodes: Sequence[int]) -> dict[int, list[int]]:
    """Return each node's ranks, ascending, from the node of each rank; nodes in order of appearance."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    return members
