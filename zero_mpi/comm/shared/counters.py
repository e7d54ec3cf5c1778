"""Progress counters of each rank, in memory that all ranks see.

A counter only grows and is written by one rank; it has a cache line of its own. A writer first writes the
data that the counter announces: data, fence, counter; a reader goes the other way: counter, fence, data. A
store or load of eight aligned bytes is one access to memory, so nobody sees half a number.
"""

from __future__ import annotations

from typing import Any

from zero_mpi.comm.shared.window import Window
from zero_mpi.comm.shared.words import COUNTERS, ENTRIES, RANK_BYTES, TABLE, WORDS


class Counters:
    """The counters POSTED, SUMMED, WRITTEN, ... of each rank, and a table of small numbers beside them.

    Collective; raises NoSharedMemory on all ranks alike.
    """

    def __init__(self, node: Any) -> None:
        rank, self._ranks = node.Get_rank(), node.Get_size()
        self._mine = rank * WORDS
        self._window = Window(node, RANK_BYTES * self._ranks, [(RANK_BYTES * rank, RANK_BYTES * (rank + 1))])
        self._words = memoryview(self._window.hand_over()).cast("q")
        for word in range(self._mine, self._mine + WORDS):
            self._words[word] = 0
        self._seen = dict.fromkeys(COUNTERS, 0)  # how far all ranks are known to have come
        self._window.fence()
        node.Barrier()

    def raise_to(self, counter: int, value: int) -> None:
        """Set this rank's counter, after everything that the rank has written so far."""
        self._window.fence()
        self._words[self._mine + counter] = value

    def all_reached(self, counter: int, value: int) -> bool:
        """Return whether every rank's counter is `value` or more: then what it stands for may be read."""
        if self._seen[counter] >= value:
            return True
        for word in range(counter, self._ranks * WORDS, WORDS):
            if self._words[word] < value:
                return False
        self._window.fence()
        self._seen[counter] = value
        return True

    def note(self, entry: int, value: int) -> None:
        """Write into this rank's table; a counter that is raised later says that it is there."""
        self._words[self._mine + TABLE + entry % ENTRIES] = value

    def noted(self, rank: int, entry: int) -> int:
        """Read from a rank's table."""
        return self._words[rank * WORDS + TABLE + entry % ENTRIES]

    def close(self) -> None:
        """Give the memory back. Collective."""
        self._words.release()
        self._window.free()

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' counters."""
        return self._window.nbytes
