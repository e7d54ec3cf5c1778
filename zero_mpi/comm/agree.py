"""How ranks agree on what they are about to make, before one of them waits for another in vain.

Each rank looks at what it was given, which may fail, and says in a few facts what it is going to make. The
problems and a digest of the facts are brought together: one short message where all is well. A problem of one
rank is raised on all of them; where the digests differ, the facts themselves are exchanged, and all ranks
raise the same error that names the first difference.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from zero_mpi.comm.base import Comm
from zero_mpi.errors import UsageError
from zero_mpi.files.text import shown

T = TypeVar("T")
Facts = Mapping[str, object]
NOTHING = "nothing"


def agreed(comm: Comm, what: str, look: Callable[[], tuple[T, Facts]]) -> T:
    """The first of look(), once its facts are the same on all ranks. Collective.

    `what` is about to be made, for people. Raises on all ranks the ValueError that `look` raises on any of
    them, and UsageError where the facts differ. `look` must not communicate.
    """
    problem: ValueError | None = None
    try:
        result, facts = look()
    except ValueError as error:
        if comm.size == 1:
            raise
        problem, facts = error, {}
    if comm.size == 1:
        return result
    spelled = {name: str(value) for name, value in facts.items()}
    mine = None if problem is None else (type(problem) is not ValueError, str(problem))
    told = comm.allgather_object((mine, hashlib.sha256(repr(spelled).encode()).hexdigest()))
    if problem is not None:
        raise problem
    raise_first([found for found, _ in told])
    if len({digest for _, digest in told}) > 1:
        raise UsageError(f"the ranks differ in {what}: {difference(comm.allgather_object(spelled))}")
    return result


def raise_first(problems: Sequence[tuple[bool, str] | None]) -> None:
    """Raise the problem of the first rank that has one: (whether it is the user's by its class, text)."""
    for rank, found in enumerate(problems):
        if found is not None:
            is_usage, text = found
            raise (UsageError if is_usage else ValueError)(f"rank {rank}: {text}")


def difference(found: Sequence[Mapping[str, str]]) -> str:
    """The first fact that is not the same on all ranks, and the rank that is alone with it."""
    for name in dict.fromkeys(name for facts in found for name in facts):
        values = [facts.get(name, NOTHING) for facts in found]
        odd = odd_one(values)
        if odd is not None:
            rank, usual = odd
            others = (
                "rank 0 has" if len(values) == 2 else f"{values.count(usual)} of {len(values)} ranks have"
            )
            return f"{name} is {shown(values[rank], 80)} on rank {rank}, where {others} {shown(usual, 80)}"
    raise AssertionError("digests differ and facts do not")


def odd_one(values: Sequence[str]) -> tuple[int, str] | None:
    """The first rank whose value is not that of most ranks, and the value of most; None if all are equal.

    Where as many have one as have another, rank 0 is taken to be right.
    """
    usual = Counter(values).most_common(1)[0][0]  # the first met, among equals
    return next(((rank, usual) for rank, value in enumerate(values) if value != usual), None)
