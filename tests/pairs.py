"""Of tests with three parameters or more, the cases in which every pair of values meets."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest

PAIRED = 3  # parameters from which on pairs of values are enough


def beyond_pairs(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Of tests with three parameters or more, those that are not needed for every pair of values to meet.

    What one case of a test says of its function, such as its transport and strategy, others say too; a third
    value beside them is more of the same. Values of fixtures count. The same on all ranks.
    """
    functions = defaultdict(list)
    for item in items:
        if len(axes := axes_of(item)) >= PAIRED:
            functions[item.nodeid.partition("[")[0]].append((item, {*combinations(axes, 2)}))
    return {item for cases in functions.values() for item in spare(cases)}


def axes_of(item: pytest.Item) -> list[tuple[Any, ...]]:
    """The parameters of a case, each with its value; those of one `parametrize` are one.

    Values count as the same where they are the same object: an index says in which case one stands.
    """
    spec = getattr(item, "callspec", None)
    if spec is None:
        return []
    got = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in got]
    groups += [[name] for name in spec.params.keys() - {name for group in groups for name in group}]
    return sorted((*names, *(id(spec.params[name]) for name in names)) for names in groups)


def spare(cases: list[tuple[Any, set[Any]]]) -> list[Any]:
    missing, left = set().union(*(pairs for _, pairs in cases)), list(cases)
    while missing:
        taken = max(left, key=lambda case: len(case[1] & missing))
        left.remove(taken)
        missing -= taken[1]
    return [item for item, _ in left]
