"""Agreement among ranks on the objects that they are about to make and on errors; exchange of results.

Each rank checks its arguments, which may raise an error, and describes them by a few facts. The ranks
exchange their errors and a digest of the facts in one short message. An error on any rank is raised on all.
If the digests differ, the ranks exchange the facts themselves, and all ranks raise the same error, which
names the first difference. A single rank runs the same code.
"""

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from zero_mpi.cli.text import ranks as named
from zero_mpi.comm.base import Comm
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.foreign import shown

T = TypeVar("T")
Facts = Mapping[str, object]
NOTHING = "nothing"
LONGEST = 80  # maximum number of characters of a value in a message


class Differs(Exception):
    """Error on all ranks: a run differs from its records. Its text is one line with the first difference."""


REFUSALS = (UsageError, JobError, Differs)  # errors that a command reports in one line; other errors are bugs
KINDS = {kind.__name__: kind for kind in (*REFUSALS, ValueError)}


def agreed(comm: Comm, name: str, prepare: Callable[[], tuple[T, Facts]]) -> T:
    """Return the result of prepare() if its facts are the same on all ranks. Collective.

    prepare() returns (result, facts) and must not communicate. `name` names the object in messages. If
    prepare() raises ValueError on any rank, all ranks raise it; if facts differ, all raise UsageError.
    """
    return alike(comm, prepare, (ValueError,), f" in {name}")


def run_on_all(comm: Comm, action: Callable[[], T]) -> T:
    """Return action(). If it raises one of REFUSALS on any rank, raise the first on all ranks. Collective.

    `action` must not communicate.
    """
    return exchange(comm, action, REFUSALS, lambda result: None)[0]


def results(comm: Comm, action: Callable[[], T]) -> list[T]:
    """Return action() of every rank, in rank order; raise errors like `run_on_all`. Collective."""
    return exchange(comm, action, REFUSALS, lambda result: result)[1]


def alike(
    comm: Comm,
    prepare: Callable[[], tuple[T, Facts]],
    caught: tuple[type[Exception], ...],
    subject: str = "",
    remedy: str = "",
) -> T:
    """Return the result of prepare(), which returns (result, facts). Raise `caught` errors on all ranks.

    If facts differ, raise on all ranks a UsageError that names the first differing fact, the first rank with
    an unusual value, and its host. `subject` and `remedy` become parts of the message. Collective.
    """

    def spelled(prepared: tuple[T, Facts] | None) -> dict[str, str]:
        facts = prepared[1] if prepared else {}
        return {name: str(getattr(value, "__qualname__", value)) for name, value in facts.items()}

    def digest(prepared: tuple[T, Facts] | None) -> str:
        return hashlib.sha256(repr(spelled(prepared)).encode()).hexdigest()

    prepared, digests = exchange(comm, prepare, caught, digest)
    if len(set(digests)) > 1:
        hosts, all_facts = zip(*comm.allgather_object((platform.node(), spelled(prepared))), strict=True)
        name, values, rank, usual = odd_fact(all_facts)
        majority = [number for number, value in enumerate(values) if value == usual]
        raise UsageError(
            f"the ranks differ{subject}: rank {rank} on {hosts[rank]} has {name} "
            f"{shown(values[rank], LONGEST)}, {named(majority)} (on {hosts[majority[0]]}) "
            f"{shown(usual, LONGEST)}{remedy}"
        )
    return prepared[0]


def exchange(
    comm: Comm, action: Callable[[], T], caught: tuple[type[Exception], ...], word: Callable[[T], Any]
) -> tuple[T, list[Any]]:
    """Return this rank's result of action(), and word(result) of every rank; raise the first `caught` error.

    The error names the failed rank, except on a rank whose own error has the same text. Collective.
    """
    result: Any = None
    problem: Exception | None = None
    try:
        result = action()
    except caught as error:
        problem = error
    kind = next((name for name, kind in KINDS.items() if isinstance(problem, kind)), "")
    answers = comm.allgather_object((kind, str(problem), word(result)))
    for rank, (kind, text, _) in enumerate(answers):
        if kind:
            raise problem if problem and str(problem) == text else KINDS[kind](f"rank {rank}: {text}")
    return result, [answer for _, _, answer in answers]


def odd_fact(all_facts: Sequence[Mapping[str, str]]) -> tuple[str, list[str], int, str]:
    """Return the first fact that differs: its name, its value on every rank, and the result of `odd_one`."""
    names = dict.fromkeys(name for facts in all_facts for name in facts)
    columns = ((name, [facts.get(name, NOTHING) for facts in all_facts]) for name in names)
    return next((name, values, *odd) for name, values in columns if (odd := odd_one(values)))


def odd_one(values: Sequence[str]) -> tuple[int, str] | None:
    """Return the first rank whose value differs from most ranks', and the usual value; None if all are equal.

    The usual value is the most frequent one; if several are, the one that the lowest rank has.
    """
    usual = Counter(values).most_common(1)[0][0]
    return next(((rank, usual) for rank, value in enumerate(values) if value != usual), None)
