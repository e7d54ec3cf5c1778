"""Packs whole documents into windows: no document that fits is cut, and none attends to another.

A document of n tokens takes n - 1 positions of a window: each but the last predicts the next one. A document
that is longer than a window is split into pieces. Pieces are packed by best fit, the longest first: each goes
where the least room stays, and into a new window if it fits nowhere (Johnson, "Fast algorithms for bin
packing", 1974; for documents Ding et al., "Fewer Truncations Improve Language Modeling", 2024). The result
depends on documents and context alone; windows are then dealt out like any others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.data.documents import Counted, Stream
from zero_mpi.data.loader import Batch, Windows, WindowSource, inside
from zero_mpi.data.token_spans import Places, read_ids, up_to

NONE, DOCUMENTS = PACKINGS = ("none", "documents")


class Packable(NamedTuple):
    """Pieces to pack: positions from `starts` (P,) on, `sizes` of them; `targets` of these count."""

    starts: Places
    sizes: Places
    targets: Places
    cut: int  # number of conversations that are longer than a window
    empty: int  # number of pieces without a target that counts, which are not among these


def pieces_of(stream: Stream, context: int, has_bos: bool = False) -> Packable:
    """Return the documents of a stream in pieces of `context` positions; of a conversation only the first.

    If a piece has a bos in front, its first token is a target too.
    """
    begins = np.append(0, stream.ends[:-1]).astype(np.int64)
    lengths = np.maximum(stream.ends - begins - 1 + has_bos, 0)
    cut = 0
    if stream.counted is None:
        counts = np.maximum(1, -(-lengths // context))
        of, skipped = np.repeat(np.arange(counts.size), counts), context * up_to(counts)
        starts, sizes = begins[of] + skipped, np.minimum(lengths[of] - skipped, context)
    else:
        starts, sizes, cut = begins, np.minimum(lengths, context), int((lengths > context).sum())
    targets = sizes if stream.counted is None else counted_within(stream.counted, starts + 1, sizes)
    kept = targets > 0
    return Packable(starts[kept], sizes[kept], targets[kept], cut, int((~kept).sum()))


def counted_within(counted: Counted, starts: Places, sizes: Places) -> Places:
    """Return how many of `sizes` flags from each of `starts` on are true; starts ascend without overlap."""
    found = np.zeros(sizes.size, np.int64)
    some = sizes > 0
    borders = np.stack([starts[some], (starts + sizes)[some]], axis=1).ravel()
    borders = borders[: borders.size - (borders.size > 0 and borders[-1] == counted.size)]
    if borders.size:
        found[some] = np.add.reduceat(counted, borders, dtype=np.int64)[::2]
    return found


def windows_over(stream: Stream, context: int, packing: str, bos: int | None = None) -> WindowSource:
    """Return the windows of a stream: `packing` fills them with documents; none: text runs through them."""
    if packing == NONE and stream.counted is None:
        return Windows(stream.ids, context, bos=bos)
    return PackedWindows(stream, context, packing == DOCUMENTS, bos)


def best_fit(sizes: Places, room: int) -> Places:
    """Return the window (P,) of each piece, all of at most `room`; windows are numbered as they are opened.

    Windows are found by the room left in them; one bit per amount of room says whether there is one.
    """
    order = np.argsort(-sizes, kind="stable")
    windows: dict[int, list[int]] = {}  # by the room left in them
    lefts = count = 0
    found = []
    for size in sizes[order].tolist():
        fitting = lefts >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            number = windows[left].pop()
            lefts ^= (not windows[left]) << left
        else:
            left, number, count = room, count, count + 1
        found.append(number)
        left -= size
        windows.setdefault(left, []).append(number)
        lefts |= (left > 0) << left
    placed = np.empty(sizes.size, np.int64)
    placed[order] = found
    return placed


class PackedWindows:
    """Windows of T = `context` positions that hold whole documents of a stream; without `packs` one in each.

    After the last document of a window ids are 0, and no target counts. `bos`: the first input of each text
    and of each part of one; a conversation has its own.
    """

    kind = "document with a token to learn: give other --data"

    def __init__(self, stream: Stream, context: int, packs: bool = True, bos: int | None = None) -> None:
        self.context, self._stream = context, stream
        self._bos = bos if stream.counted is None else None
        self.pieces = pieces = pieces_of(stream, context, self._bos is not None)
        window = best_fit(pieces.sizes, context) if packs else np.arange(pieces.sizes.size)
        order = np.argsort(window, kind="stable")
        self._starts, self._sizes = pieces.starts[order], pieces.sizes[order]
        held = np.bincount(window)
        self._ends = np.cumsum(held)
        self._held = held
        self._targets = np.bincount(window, pieces.targets).astype(np.int64)

    def __len__(self) -> int:
        return self._held.size

    @property
    def filled(self) -> float:
        """Share of all positions that documents take."""
        return float(self._sizes.sum() / max(1, len(self) * self.context))

    def about(self) -> str:
        """Return how many documents are in how many windows, how full these are, and how many are cut."""
        kind = "documents and parts of long ones"
        if self._stream.counted is not None:
            kind = f"conversations ({self.pieces.cut:,} cut)"
        return f"{self._sizes.size:,} {kind} in {len(self):,} windows, {int(100 * self.filled)} % full"

    def known(self, index: int) -> int:
        """Return the number of a window's targets that earlier windows have predicted: 0, as none overlap."""
        return 0

    def counted(self, indices: ArrayLike) -> int:
        """Return the number of targets of the windows `indices` that count."""
        return int(self._targets[np.asarray(indices, np.int64)].sum())

    def batch(self, indices: ArrayLike) -> Batch:
        """Return inputs and targets of the windows `indices` (b,), and where their documents begin.

        Raises IndexError for an index outside 0..len-1.
        """
        wanted = inside(indices, len(self))
        held, shape = self._held[wanted], (len(wanted), self.context)
        pieces = np.repeat(self._ends[wanted] - held, held) + up_to(held)
        sizes, rows = self._sizes[pieces], np.repeat(np.arange(len(wanted)), held)
        before = np.cumsum(sizes) - sizes
        columns = before - before[np.cumsum(held) - held][rows]
        places = np.repeat(rows * self.context + columns, sizes) + up_to(sizes)
        spans = self._starts[pieces], sizes + (self._bos is None)
        ids, counted = read_ids(self._stream.ids, *spans).astype(np.int64), self._stream.counted
        if self._bos is not None:
            ids = np.insert(ids, before, self._bos)
        within = up_to(sizes + 1)
        is_target, is_input = within > 0, within < np.repeat(sizes, sizes + 1)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, UNCOUNTED, np.int64)
        begins = np.tile(np.arange(self.context), (len(wanted), 1))  # each position after the last is alone
        inputs.reshape(-1)[places] = ids[is_input]
        if counted is not None:
            ids = np.where(read_ids(counted, *spans), ids, UNCOUNTED)
        targets.reshape(-1)[places] = ids[is_target]
        begins.reshape(-1)[places] = np.repeat(columns, sizes)
        return Batch(inputs, targets, begins)

    def notes(self) -> list[str]:
        """Return notes on what is left out, for the user."""
        found, kind = [], "documents" if self._stream.counted is None else "conversations"
        if self.pieces.cut:
            found.append(
                f"{self.pieces.cut:,} of {self._stream.ends.size:,} conversations are longer than --context "
                f"{self.context}: their ends are left out; use a larger --context to keep them"
            )
        if self.pieces.empty:
            found.append(f"{self.pieces.empty:,} {kind} are left out: no token of them is to be learned")
        return found
