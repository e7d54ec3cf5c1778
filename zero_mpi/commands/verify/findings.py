"""What is not as a run says, found by one rank and raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World

T = TypeVar("T")


class Differs(Exception):
    """A run is not what it says: the first difference, in a line."""


@contextmanager
def differing() -> Iterator[None]:
    """Let what a file of the run should not be (UsageError) be a difference."""
    try:
        yield
    except UsageError as error:
        raise Differs(str(error)) from error


def agreed(world: World, action: Callable[[], T]) -> T:
    """action() of this rank; the first difference that any rank finds is raised on all. Collective.

    It must not communicate. Raises as `World.together` as well.
    """
    found: list[T] = []

    def attempt() -> str:
        try:
            found.append(action())
        except Differs as difference:
            return str(difference)
        return ""

    told = next(filter(None, world.results(attempt)), "")
    if told:
        raise Differs(told)
    return found[0]


def of_root(world: World, action: Callable[[], T]) -> T:
    """action() of rank 0, on all ranks; raises as `agreed`. Collective."""
    found = agreed(world, lambda: action() if world.rank == 0 else None)
    told: T = world.comm.broadcast_object(found)
    return told
