"""Registration of operations: `operation` registers definitions, and `implements` faster versions.

Both decorators return the function unchanged. The package and its tests get all lists of operations from this
module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch, wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from zero_mpi.ops import signatures
from zero_mpi.ops.low_precision import BFLOAT16, WIDENED, accept_low

F = TypeVar("F", bound=Callable[..., Any])

OPERATIONS: dict[str, Any] = {}  # name -> function that calls the version for its first array's type
VERSIONS: dict[type, dict[str, Callable[..., Any]]] = {}  # array type -> operation's name -> faster version
defined = SimpleNamespace()
"""Reference version of each operation, for arrays that no kernel supports."""


class Found(dict[type, Callable[..., Any]]):
    """Cache that maps an array type to the version for it, because a look-up by singledispatch is slower."""

    def __init__(self, search: Callable[[type], Callable[..., Any]]) -> None:
        self._search = search

    def __missing__(self, kind: type) -> Callable[..., Any]:
        version = self[kind] = self._search(kind)
        return version


def operation(text: str, *, widens: bool = True) -> Callable[[F], F]:
    """Return a decorator that makes a definition an operation, which checks the arrays of every call.

    text        signature of the operation, see `signatures`
    widens      whether bfloat16 and float16 arrays become float32 copies for the definition
    """

    def define(definition: F) -> F:
        name, signature = definition.__name__, signatures.parse(text)
        if widens:
            WIDENED[name] = signature

        @wraps(definition)
        def quietly(*arguments: Any, **keywords: Any) -> Any:
            with np.errstate(over="ignore", invalid="ignore"):  # the gradient norm shows overflow
                return definition(*arguments, **keywords)

        setattr(defined, name, accept_low(name, definition))
        versions = singledispatch(accept_low(name, quietly))
        cache = Found(versions.dispatch)

        def register(kind: type, version: Any = None) -> Any:
            cache.clear()
            return versions.register(kind, version)

        dispatched: Any = wraps(versions)(signatures.checked(definition, signature, cache))
        dispatched.register, dispatched.signature = register, signature
        OPERATIONS[name] = dispatched
        return definition

    return define


def implements(
    definition: Callable[..., Any], kind: type = np.ndarray, low: Sequence[Any] = (BFLOAT16,)
) -> Callable[[F], F]:
    """Return a decorator that registers a function as the version of an operation for an array type.

    low: supported low-precision types; on the host, other low-precision arrays become float32 copies.
    """

    def add(version: F) -> F:
        of_kind, name = VERSIONS.setdefault(kind, {}), definition.__name__
        of_kind[name] = accept_low(name, version, low) if kind is np.ndarray else version
        return version

    return add


def register(kind: type) -> None:
    """Make all operations use their faster versions for arrays of this type from now on."""
    for name, version in VERSIONS[kind].items():
        OPERATIONS[name].register(kind, version)
