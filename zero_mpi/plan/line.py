"""The line that transfers go over, one behind the other: the busiest of a job's links.

A sum that goes to the last node and back along its lane passes the link before that node twice: it joins the
line again as soon as it has left it, behind what was started meanwhile. All sums begin on the first node, so
how long they are on their way to that link makes no difference between them; it counts in `after`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds of a transfer: on the line, on the line on its way back, and beside it on all other links."""

    busy: float
    back: float = 0.0
    after: float = 0.0


class TransferLine:
    """When transfers are complete; they are started in the order of time."""

    def __init__(self) -> None:
        self._free = 0.0
        self._done: dict[object, float] = {}
        self._returning: deque[tuple[float, object, Cost]] = deque()  # (since when, what, its cost)

    def start(self, what: object, now: float, cost: Cost) -> None:
        """A transfer begins, behind what is on the line."""
        while self._returning and self._returning[0][0] <= now:
            self._bring_back()
        self._returning.append((self._pass(now, cost.busy), what, cost))

    def complete(self, what: object) -> float:
        """When a transfer is; 0 where none is under way. Until then nothing else may be started."""
        while any(what == other for _, other, _ in self._returning):
            self._bring_back()
        return self._done.pop(what, 0.0)

    def _bring_back(self) -> None:
        since, what, cost = self._returning.popleft()
        passed = self._pass(since, cost.back) if cost.back else since
        self._done[what] = passed + cost.after

    def _pass(self, joins: float, seconds: float) -> float:
        self._free = max(self._free, joins) + seconds
        return self._free
