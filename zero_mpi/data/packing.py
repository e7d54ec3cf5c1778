"""Packs full documents into windows. A document that fits is never cut, and no document attends to another.

A document of n tokens takes n - 1 positions of a window: each token but the last predicts the next one. A
text that is longer than a window is split into pieces; a conversation is cut off. Pieces are packed by
best fit, longest first: each goes into the fullest window that still has space for it, or into a new one
(Johnson, "Fast algorithms for bin packing", 1974; Ding et al., "Fewer Truncations Improve Language Modeling",
2024). The result depends only on the documents and the context. The windows are shuffled later.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.data.documents import Counted, Places, Stream, read_ids, up_to
from zero_mpi.data.loader import Batch, Windows, WindowSource, inside

NONE, DOCUMENTS = PACKINGS = ("none", "documents")


class Packable(NamedTuple):
    """Pieces to pack: piece p has `sizes[p]` positions from `starts[p]` on, of which `targets[p]` count."""

    starts: Places
    sizes: Places
    targets: Places
    cut: int  # number of conversations or pairs that are cut because they are longer than a window
    empty: int  # number of pieces that are left out because none of their targets counts


def pieces_of(stream: Stream, context: int, has_bos: bool = False) -> Packable:
    """Return the pieces of a stream's documents, of at most `context` positions; a conversation has one.

    If a piece has a bos in front, its first token is a target too.
    """
    begins = np.append(0, stream.ends[:-1]).astype(np.int64)
    lengths = np.maximum(stream.ends - begins - 1 + has_bos, 0)
    cut = 0
    if stream.counted is None:
        counts = np.maximum(1, -(-lengths // context))
        documents, skipped = np.repeat(np.arange(counts.size), counts), context * up_to(counts)
        starts, sizes = begins[documents] + skipped, np.minimum(lengths[documents] - skipped, context)
    else:
        starts, sizes, cut = begins, np.minimum(lengths, context), int((lengths > context).sum())
    targets = sizes if stream.counted is None else counted_within(stream.counted, starts + 1, sizes)
    mask = targets > 0
    return Packable(starts[mask], sizes[mask], targets[mask], cut, int((~mask).sum()))


def counted_within(counted: Counted, starts: Places, sizes: Places) -> Places:
    """Return how many of the `sizes[i]` flags from `starts[i]` on are true. Ranges are sorted, disjoint."""
    counts = np.zeros(sizes.size, np.int64)
    mask = sizes > 0
    borders = np.stack([starts[mask], (starts + sizes)[mask]], axis=1).ravel()
    borders = borders[: borders.size - (borders.size > 0 and borders[-1] == counted.size)]
    if borders.size:
        counts[mask] = np.add.reduceat(counted, borders, dtype=np.int64)[::2]
    return counts


def windows_over(
    stream: Stream, context: int, packing: str, bos: int | None = None, paired: bool = False
) -> WindowSource:
    """Return the windows of a stream, which hold documents or, for unpacked text, continuous text."""
    if paired:
        return PairWindows(stream, context, packing == DOCUMENTS)
    if packing == NONE and stream.counted is None:
        return Windows(stream.ids, context, bos=bos)
    return PackedWindows(stream, context, packing == DOCUMENTS, bos)


def best_fit(sizes: Places, limit: int) -> Places:
    """Return the window number (P,) of each piece. Each piece has at most `limit` positions.

    Windows are found by their number of free positions. Bit n of `mask` is set if a window has n free.
    """
    order = np.argsort(-sizes, kind="stable")
    windows: dict[int, list[int]] = {}  # numbers of windows, keyed by their number of free positions
    mask = count = 0
    numbers = []
    for size in sizes[order].tolist():
        fitting = mask >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            number = windows[free].pop()
            mask ^= (not windows[free]) << free
        else:
            free, number, count = limit, count, count + 1
        numbers.append(number)
        free -= size
        windows.setdefault(free, []).append(number)
        mask |= (free > 0) << free
    placed = np.empty(sizes.size, np.int64)
    placed[order] = numbers
    return placed


class PackedWindows(WindowSource):
    """Windows of T = `context` positions with full documents of a stream; one document each if not `packs`.

    After a window's last document, ids are 0 and no target counts. `bos`: the first input of each piece of a
    text; a conversation brings its own bos.
    """

    kind, unit = "document with a token to train on: use other --data", "conversations"

    def __init__(self, stream: Stream, context: int, packs: bool = True, bos: int | None = None) -> None:
        self.context, self._stream = context, stream
        self._bos = bos if stream.counted is None else None
        self.pieces = pieces = pieces_of(stream, context, self._bos is not None)
        self._put(best_fit(pieces.sizes, context) if packs else np.arange(pieces.sizes.size))

    def _put(self, window: Places) -> Places:
        """Put piece p into window `window[p]`; return the order in which the windows hold the pieces."""
        order = np.argsort(window, kind="stable")
        self._starts, self._sizes = self.pieces.starts[order], self.pieces.sizes[order]
        self._piece_counts = np.bincount(window)
        self._ends = np.cumsum(self._piece_counts)
        self._targets = np.bincount(window, self.pieces.targets).astype(np.int64)
        return order

    def __len__(self) -> int:
        return self._piece_counts.size

    @property
    def filled(self) -> float:
        """Fraction of all positions that documents fill."""
        return float(self._sizes.sum() / max(1, len(self) * self.context))

    def about(self) -> str:
        kind = "documents and parts of long ones"
        if self._stream.counted is not None:
            kind = f"{self.unit} ({self.pieces.cut:,} cut)"
        return f"{self._sizes.size:,} {kind} in {len(self):,} windows, {int(100 * self.filled)} % full"

    def overlap(self, index: int) -> int:
        """Return how many of a window's targets earlier windows predict: 0, since windows do not overlap."""
        return 0

    def counted(self, indices: ArrayLike) -> int:
        return int(self._targets[np.asarray(indices, np.int64)].sum())

    def batch(self, indices: ArrayLike) -> Batch:
        return self._batch(*self._layout(indices))

    def places(self, indices: ArrayLike) -> Places:
        """Return the index in the stream of each target of the windows `indices`, (b, T); -1 for none."""
        pieces, rows, columns = self._layout(indices)
        sizes, places = self._sizes[pieces], np.full((np.size(indices), self.context), -1, np.int64)
        flat = np.repeat(rows * self.context + columns, sizes) + up_to(sizes)
        first = self._starts[pieces] + (self._bos is None)
        places.reshape(-1)[flat] = np.repeat(first, sizes) + up_to(sizes)
        return places

    def _layout(self, indices: ArrayLike) -> tuple[Places, Places, Places]:
        """Return the pieces of the windows `indices`, the batch row of each piece, and its first column."""
        windows = inside(indices, len(self))
        counts = self._piece_counts[windows]
        pieces = np.repeat(self._ends[windows] - counts, counts) + up_to(counts)
        offsets = np.cumsum(self._sizes[pieces]) - self._sizes[pieces]
        rows = np.repeat(np.arange(len(windows)), counts)
        return pieces, rows, offsets - offsets[np.cumsum(counts) - counts][rows]

    def _batch(self, pieces: Places, rows: Places, columns: Places) -> Batch:
        sizes, shape = self._sizes[pieces], (int(rows[-1]) + 1 if rows.size else 0, self.context)
        offsets = np.cumsum(sizes) - sizes
        places = np.repeat(rows * self.context + columns, sizes) + up_to(sizes)
        spans = self._starts[pieces], sizes + (self._bos is None)
        ids, counted = read_ids(self._stream.ids, *spans).astype(np.int64), self._stream.counted
        if self._bos is not None:
            ids = np.insert(ids, offsets, self._bos)
        index = up_to(sizes + 1)
        is_target, is_input = index > 0, index < np.repeat(sizes, sizes + 1)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, UNCOUNTED, np.int64)
        begins = np.tile(np.arange(self.context), (shape[0], 1))  # an unused position attends only to itself
        inputs.reshape(-1)[places] = ids[is_input]
        if counted is not None:
            ids = np.where(read_ids(counted, *spans), ids, UNCOUNTED)
        targets.reshape(-1)[places] = ids[is_target]
        begins.reshape(-1)[places] = np.repeat(columns, sizes)
        return Batch(inputs, targets, begins)

    def notes(self) -> list[str]:
        notes, kind = [], "documents" if self._stream.counted is None else self.unit
        if self.pieces.cut:
            notes.append(
                f"{self.pieces.cut:,} of {self._stream.ends.size:,} {self.unit} are longer than --context "
                f"{self.context} and are cut; use a larger --context to keep their ends"
            )
        if self.pieces.empty:
            notes.append(f"{self.pieces.empty:,} {kind} are skipped: they have no token to train on")
        return notes


class PairBatch(NamedTuple):
    """Micro-batch of pairs: the tokens, and where each of its S sequences is.

    numbers   (S,) 2 * pair + side of each sequence: the pair's number in the data; side 1: the worse answer
    spans     (row, slice of columns) of each sequence
    rest      (b, T) the targets that do not count, which are the prompts' tokens; -1 elsewhere
    """

    batch: Batch
    numbers: Places
    spans: list[tuple[int, slice]]
    rest: Places

    def members(self, row: int) -> list[int]:
        """Return the indices of the sequences in a row."""
        return [n for n, (at, _) in enumerate(self.spans) if at == row]

    def answers(self) -> list[slice]:
        """Return the columns of each answer's targets."""
        starts = (int(np.argmax(self.batch.targets[place] != UNCOUNTED)) for place in self.spans)
        return [slice(span.start + n, span.stop) for n, (_, span) in zip(starts, self.spans, strict=True)]


class PairWindows(PackedWindows):
    """Windows that hold full pairs. The two sides of a pair are documents that do not attend to each other.

    If a pair does not fit, its longer side is cut; if both sides exceed half a window, both are cut to half.
    """

    kind, unit = "pair with an answer to train on: use other --data", "answers of pairs"

    def __init__(self, stream: Stream, context: int, packs: bool = True) -> None:
        assert stream.counted is not None, "pairs have counted answers"
        self.context, self._stream, self._bos = context, stream, None
        begins = np.append(0, stream.ends[:-1]).astype(np.int64)
        lengths = np.maximum(stream.ends - begins - 1, 0)
        of_pairs = lengths.reshape(-1, 2)
        limit = np.maximum(context // 2, context - of_pairs.min(axis=1))
        sizes = np.minimum(lengths, np.repeat(limit, 2))
        targets = counted_within(stream.counted, begins + 1, sizes)
        valid = ((targets > 0) == (lengths > 0)).reshape(-1, 2).all(axis=1)  # a part of each answer remains
        mask = np.repeat(valid, 2) & (sizes > 0)
        cut, empty = of_pairs > limit[:, None], of_pairs[~valid] > 0
        self.pieces = Packable(begins[mask], sizes[mask], targets[mask], int(cut.sum()), int(empty.sum()))
        numbers = np.flatnonzero(mask)
        pairs, place = np.unique(numbers // 2, return_inverse=True)
        in_pairs = np.bincount(place, sizes[mask], minlength=pairs.size).astype(np.int64)
        window = best_fit(in_pairs, context) if packs else np.arange(pairs.size)
        order = self._put(window[place])
        self._numbers, self._counts = numbers[order], self.pieces.targets[order]
        self.sides = stream.ends.size

    def sequences(self, indices: ArrayLike) -> tuple[Places, Places, Places]:
        """Return three arrays (S,): the sequences' numbers, counted targets and positions."""
        pieces = self._layout(indices)[0]
        return self._numbers[pieces], self._counts[pieces], self._sizes[pieces]

    def pairs(self, indices: ArrayLike) -> PairBatch:
        pieces, rows, columns = layout = self._layout(indices)
        batch, sizes = self._batch(*layout), self._sizes[pieces]
        flat, offsets = np.repeat(rows * self.context + columns, sizes), up_to(sizes)
        rest = np.full_like(batch.targets, UNCOUNTED)
        rest.reshape(-1)[flat + offsets] = read_ids(self._stream.ids, self._starts[pieces] + 1, sizes)
        rest[batch.targets != UNCOUNTED] = UNCOUNTED
        spans = zip(rows.tolist(), columns.tolist(), (columns + sizes).tolist(), strict=True)
        return PairBatch(batch, self._numbers[pieces], [(row, slice(a, b)) for row, a, b in spans], rest)

    def mismatched(self, indices: ArrayLike) -> PairBatch:
        """Return `pairs` with exchanged answers; see `mismatched`. `others` are the windows after these."""
        windows = np.asarray(indices, np.int64)
        return mismatched(self.pairs(windows), self.pairs((windows + 1) % len(self)))


def mismatched(pairs: PairBatch, others: PairBatch) -> PairBatch:
    """Return a micro-batch in which each prompt is followed by an answer of another pair.

    The answers of a window rotate by one, in an order with better before worse sides. Where this gives an
    answer of the prompt's own pair, an answer from the window in `others` replaces it, cut to the free space.
    """
    shape, spans = pairs.batch.inputs.shape, list[tuple[int, slice]]()
    inputs, targets = np.zeros(shape, np.int64), np.full(shape, UNCOUNTED)
    begins, answers, spare = np.tile(np.arange(shape[1]), (shape[0], 1)), pairs.answers(), others.answers()
    for row in range(len(inputs)):
        members, lenders = pairs.members(row), others.members(row)
        order, column = sorted(members, key=lambda n: int(pairs.numbers[n]) % 2), 0
        free = shape[1] - pairs.spans[members[-1]][1].stop
        for place, n in enumerate(members):
            prompt = slice(pairs.spans[n][1].start, answers[n].start + 1)
            source, index = pairs.batch, order[order.index(n) - 1]
            answer = answers[index]
            if pairs.numbers[index] // 2 == pairs.numbers[n] // 2:
                source, free = others.batch, free + answer.stop - answer.start
                answer = spare[lenders[place % len(lenders)]]
                answer = slice(answer.start, min(answer.stop, answer.start + free))
                free -= answer.stop - answer.start
            first = column + answers[n].start - prompt.start  # column of the first target
            stop = first + answer.stop - answer.start
            targets[row, first:stop] = source.targets[row, answer]
            inputs[row, column : first + 1] = pairs.batch.inputs[row, prompt]
            inputs[row, first + 1 : stop] = source.inputs[row, answer][1:]
            begins[row, column:stop] = column
            spans.append((row, slice(column, stop)))
            column = stop
    return PairBatch(Batch(inputs, targets, begins), pairs.numbers, spans, pairs.rest)
