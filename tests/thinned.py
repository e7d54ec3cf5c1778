"""Cases of which `make test` runs the first few, and `make test-all` every one."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], keep: int = 1) -> list[Any]:
    """Values for `pytest.mark.parametrize`; those after the first `keep` are more of the same.

    A tuple holds the values of several parameters. The first ones must show all that is claimed.
    """
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*values, marks=[pytest.mark.exhaustive] if number >= keep else [])
        for number, values in enumerate(given)
    ]
