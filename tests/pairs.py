"""Selection of cases that cover every pair of values, for tests with three or more parameters."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest

PAIRED = 3  # tests with at least this many parameters run only enough cases to cover all pairs


def beyond_pairs(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return cases that are not needed to cover all pairs of values, of tests with three or more parameters.

    A pair of values, such as transport and strategy, occurs in several cases, which differ only in further
    values and add little. Values of fixtures count too. The result is the same on all ranks.
    """
    functions = defaultdict(list)
    for item in items:
        if len(axes := axes_of(item)) >= PAIRED:
            functions[item.nodeid.partition("[")[0]].append((item, {*combinations(axes, 2)}))
    return {item for cases in functions.values() for item in spare(cases)}


def axes_of(item: pytest.Item) -> list[tuple[Any, ...]]:
    """Return the parameters of a case with their values; all names of a `parametrize` are one parameter.

    Values are equal if they are the same object.
    """
    spec = getattr(item, "callspec", None)
    if spec is None:
        return []
    axes = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in axes]
    groups += [[name] for name in spec.params.keys() - {name for group in groups for name in group}]
    return sorted((*names, *(id(spec.params[name]) for name in names)) for names in groups)


def spare(cases: list[tuple[Any, set[Any]]]) -> list[Any]:
    missing, left = set().union(*(pairs for _, pairs in cases)), list(cases)
    while missing:
        best = max(left, key=lambda case: len(case[1] & missing))
        left.remove(best)
        missing -= best[1]
    return [item for item, _ in left]
