"""The operations that layers and optimizers are made of, chosen by the type of their first array.

`reference` defines each one. A faster version for an array type registers itself with
`ops.NAME.register(ArrayType)`; callers write `ops.NAME(...)` and never ask where an array lies. For NumPy
arrays that is `ops.cpu`, where numba and SciPy are installed; it is loaded by `prepare` or by the first
operation, and ZERO_MPI_OPS=reference keeps it away.
"""

import os
from collections.abc import Callable
from functools import singledispatch
from importlib.util import find_spec
from typing import Any

import numpy as np

from zero_mpi.ops import code_cache, reference

add = singledispatch(reference.add)
linear = singledispatch(reference.linear)
linear_backward_x = singledispatch(reference.linear_backward_x)
linear_backward_w = singledispatch(reference.linear_backward_w)
linear_backward_b = singledispatch(reference.linear_backward_b)
embedding = singledispatch(reference.embedding)
embedding_backward = singledispatch(reference.embedding_backward)
positions = singledispatch(reference.positions)
positions_backward = singledispatch(reference.positions_backward)
rms_norm = singledispatch(reference.rms_norm)
rms_norm_backward = singledispatch(reference.rms_norm_backward)
layer_norm = singledispatch(reference.layer_norm)
layer_norm_backward = singledispatch(reference.layer_norm_backward)
gelu = singledispatch(reference.gelu)
gelu_backward = singledispatch(reference.gelu_backward)
swiglu = singledispatch(reference.swiglu)
swiglu_backward = singledispatch(reference.swiglu_backward)
rope = singledispatch(reference.rope)
causal_attention = singledispatch(reference.causal_attention)
causal_attention_backward = singledispatch(reference.causal_attention_backward)
cross_entropy = singledispatch(reference.cross_entropy)
linear_cross_entropy = singledispatch(reference.linear_cross_entropy)
adamw = singledispatch(reference.adamw)
chunk_squares = singledispatch(reference.chunk_squares)

_compiles = (
    os.environ.get("ZERO_MPI_OPS") != "reference"
    and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
    and find_spec("numba") is not None
)
_prepared = False


def backend() -> str:
    """What computes on NumPy arrays: "numba 0.68.1", or "numpy" for the reference."""
    return f"numba {code_cache.installed('numba')}" if _compiles else "numpy"


def prepare(say: Callable[[str], object] | None = None) -> None:
    """Compile all kernels for this machine, or load them from the cache; once is enough.

    Before it compiles, which takes ten seconds or so, it tells `say` in one line. Where many ranks start at
    once let one of each node go first: the others then find the cache filled.
    """
    global _prepared
    if _prepared or not _compiles:
        return
    if say is not None and not code_cache.is_complete():
        say(f"compiling the operations for this processor, once: they are kept in {code_cache.folder()}")
    from zero_mpi.ops import cpu

    for operation in cpu.OPERATIONS:
        globals()[operation.__name__].register(np.ndarray, operation)
    code_cache.mark_complete()
    _prepared = True


def _on_first_use(name: str) -> Callable[..., Any]:
    """What stands in for an operation until kernels are loaded."""

    def load_and_call(*arguments: Any, **named: Any) -> Any:
        prepare()
        return globals()[name](*arguments, **named)

    return load_and_call


if _compiles:
    for _name in [name for name, value in globals().items() if hasattr(value, "registry")]:
        globals()[_name].register(np.ndarray, _on_first_use(_name))
