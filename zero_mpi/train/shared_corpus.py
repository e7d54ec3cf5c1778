"""The text that rank 0 has read, on every rank: ids that lie in files by their places, all else by broadcast.

Little text is held by each rank, so that nothing which happens to a file later can end the run. Of more, each
rank reads what it trains on, and the host keeps the pages once. Where a rank does not see the same files (a
disk of one host, a copy that is another one), all get the ids from rank 0, which takes their size on each.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np

from zero_mpi.comm import Comm
from zero_mpi.data import Corpus
from zero_mpi.data.documents import Stream
from zero_mpi.data.token_spans import TokenSpans
from zero_mpi.errors import JobError
from zero_mpi.files.foreign import shown

Place = tuple[str, int, str]  # side of the corpus, number of the part, name of what its stream has there
SIDES = ("parts", "held_out")


def share_corpus(comm: Comm, corpus: Corpus | None, notes: list[str]) -> Corpus:
    """Rank 0's corpus on every rank, so all train on the same text. Collective; adds to `notes`."""
    about, own = None, dict[Place, Any]()
    if corpus is not None:
        own = {
            (side, number, name): array
            for side in SIDES
            for number, part in enumerate(getattr(corpus, side))
            for name, array in vars(part.stream).items()
        }
        bare = {side: tuple(part._replace(stream=None) for part in getattr(corpus, side)) for side in SIDES}
        about = {place: described(x) for place, x in own.items() if x is not None}, vars(corpus) | bare
    found, rest = comm.broadcast_object(about)
    in_files = {place: x for place, x in found.items() if isinstance(x, TokenSpans)}
    if in_files and (problem := unseen(comm, in_files)):
        notes.append(problem)
        found |= {place: (spans.dtype.str, spans.size) for place, spans in in_files.items()}
    streams: dict[tuple[str, int], dict[str, Any]] = {}
    for place, what in found.items():
        *side, name = place
        streams.setdefault(tuple(side), {})[name] = (
            what
            if isinstance(what, TokenSpans)
            else broadcast(comm, own.get(place), what, f"corpus {' '.join(map(str, place))}")
        )
    for side in SIDES:
        rest[side] = tuple(
            part._replace(stream=Stream(**streams[side, number])) for number, part in enumerate(rest[side])
        )
    return Corpus(**rest)


def described(ids: Any) -> TokenSpans | tuple[str, int]:
    """What other ranks have to know of an array before they have it, or all of one that stays in files."""
    return ids if isinstance(ids, TokenSpans) and ids.stays else (ids.dtype.str, ids.size)


def unseen(comm: Comm, in_files: dict[Place, TokenSpans]) -> str:
    """Why ranks cannot read the files themselves, alike on all; empty where they can. Collective."""
    told = comm.allgather_object((platform.node(), looked_at(in_files)))
    expected = told[0][1]
    rank = next((rank for rank, (_, seen) in enumerate(told) if seen != expected), None)
    if rank is None:
        return ""
    nbytes = sum(spans.size * spans.dtype.itemsize for spans in in_files.values())
    path = next(span.path for spans in in_files.values() for span in spans.spans)
    return (
        f"rank {rank} on {told[rank][0]} does not see {shown(path)}, which rank 0 on {told[0][0]} reads: "
        f"each rank holds {nbytes / 2**20:,.0f} MiB of ids; a place that all hosts see would spare them (for "
        "text ZERO_MPI_CACHE)"
    )


def looked_at(in_files: dict[Place, TokenSpans]) -> str:
    """A text that is the same on ranks that see the same ids, and empty where they cannot be read."""
    try:
        return " ".join(in_files[place].sampled_digest().hex() for place in sorted(in_files))
    except JobError:
        return ""


def broadcast(comm: Comm, own: Any, described: tuple[str, int], label: str) -> np.ndarray[Any, Any]:
    """An array of rank 0, held or in files, as one that every rank holds. Collective."""
    kind, size = described
    if comm.size == 1 and isinstance(own, np.ndarray):
        return np.ascontiguousarray(own)
    array = own.held() if isinstance(own, TokenSpans) else np.empty(size, kind)
    if isinstance(own, np.ndarray):
        array[...] = own
    comm.broadcast(array, label=label).wait()
    return array
