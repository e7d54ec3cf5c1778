"""Registration of operations: `operation` registers definitions, and `implements` faster versions.

Both decorators return the function unchanged. The package and its tests get all lists of operations from this
module.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zero_mpi.ops import signatures
from zero_mpi.ops.low_precision import BFLOAT16, SIGNATURES, accept_low

F = TypeVar("F", bound=Callable[..., Any])

OPERATIONS: dict[str, Any] = {}  # name -> function that calls the version for its first array's type
VERSIONS: dict[type, dict[str, Callable[..., Any]]] = {}  # array type -> operation's name -> faster version
if TYPE_CHECKING:
    from zero_mpi.ops import reference

    definitions = reference
else:
    definitions = SimpleNamespace()  # the version of each operation for arrays that no kernel supports


class Versions(dict[type, Callable[..., Any]]):
    """Versions of an operation by array type. A type without one uses that of its nearest base class."""

    def __missing__(self, kind: type) -> Callable[..., Any]:
        return next(self[base] for base in kind.__mro__ if base in self)

    def register(self, kind: type, version: F) -> F:
        self[kind] = version
        return version


def operation(text: str, *, widens: bool = True) -> Callable[[F], F]:
    """Return a decorator that makes a definition an operation, which checks the arrays of every call.

    text        signature of the operation, see `signatures`
    widens      whether bfloat16 and float16 arrays become float32 copies for the definition
    """

    def define(definition: F) -> F:
        name, signature = definition.__name__, signatures.parse(text)
        if widens:
            SIGNATURES[name] = signature
        quietly = np.errstate(over="ignore", invalid="ignore")(definition)  # the gradient norm shows overflow
        versions = Versions({object: accept_low(name, quietly)})
        dispatched: Any = wraps(definition)(signatures.checked(definition, signature, versions))
        dispatched.registry, dispatched.register = versions, versions.register
        dispatched.signature = signature
        OPERATIONS[name] = dispatched
        setattr(definitions, name, versions[object])
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
    """Make all operations use their faster versions, if any, for arrays of this type from now on."""
    for name, operation in OPERATIONS.items():
        operation.register(kind, VERSIONS[kind].get(name, operation.registry[object]))
