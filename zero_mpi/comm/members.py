"""Which ranks are on which node, without asking anybody."""

from __future__ import annotations

from collections.abc import Sequence


def members_of(nodes: Sequence[int]) -> dict[int, list[int]]:
    """The ranks of each node in ascending order, from the node of each rank; nodes as they first come."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    return members
