"""Windows of several sources side by side, of which `sample_order` deals out each source's share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from zero_mpi.data.loader import Batch, WindowSource, inside
from zero_mpi.data.sample_order import Places


class MixedWindows:
    """Windows of several sources, of one context, as one row of them, those of the first source first."""

    kind = "window"

    def __init__(self, parts: Sequence[WindowSource]) -> None:
        self.parts, self.context = parts, parts[0].context
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _by_part(self, indices: ArrayLike) -> list[tuple[WindowSource, Places, Places]]:
        """(part, rows of these indices that are of it, its own numbers of them), of parts that have any."""
        wanted = inside(indices, len(self))
        of = np.searchsorted(self._ends, wanted, "right")
        rows = [np.flatnonzero(of == number) for number in range(len(self.parts))]
        begins = self._ends - [len(part) for part in self.parts]
        return [
            (part, here, wanted[here] - begins[number])
            for number, (part, here) in enumerate(zip(self.parts, rows, strict=True))
            if here.size
        ]

    def counted(self, indices: ArrayLike) -> int:
        return sum(part.counted(numbers) for part, _, numbers in self._by_part(indices))

    def batch(self, indices: ArrayLike) -> Batch:
        """The windows `indices` (b,); a row of running text is one document where others hold several."""
        cut = [(rows, part.batch(numbers)) for part, rows, numbers in self._by_part(indices)]
        if len(cut) == 1:
            return cut[0][1]
        shape = (np.size(indices), self.context)
        inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        packed = any(batch.begins is not None for _, batch in cut)
        begins = np.zeros(shape, np.int64) if packed else None
        for rows, batch in cut:
            inputs[rows], targets[rows] = batch.inputs, batch.targets
            if begins is not None and batch.begins is not None:
                begins[rows] = batch.begins
        return Batch(inputs, targets, begins)

    def about(self) -> str:
        return "; ".join(filter(None, (part.about() for part in self.parts)))

    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.notes()]
