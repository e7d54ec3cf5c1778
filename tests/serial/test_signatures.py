"""Operations refuse arrays with wrong shapes or types, in the reference and the compiled version."""

from collections.abc import Callable
from typing import Any

import misfits
import numpy as np
import pytest

from zero_mpi import GradAccum, SerialComm, ShardedModule, nn, ops
from zero_mpi.nn import CrossEntropy, Stage
from zero_mpi.ops.low_precision import BFLOAT16
from zero_mpi.ops.registry import OPERATIONS

ops.prepare(kind=BFLOAT16)


class Plain(np.ndarray):
    """Array type for which all operations use the reference."""


for operation in OPERATIONS.values():
    operation.register(Plain, operation.registry[object])


def spread(x: np.ndarray) -> np.ndarray:
    return np.repeat(x, 2, axis=-1)[..., ::2]


def copied(x: np.ndarray) -> np.ndarray:
    return x.copy() if x.flags.c_contiguous else spread(x)


def placed(kind: type) -> Callable[[np.ndarray], Any]:
    return lambda x: copied(x).view(kind)


versions = pytest.mark.parametrize("kind", [Plain, np.ndarray], ids=["reference", "compiled"])


@versions
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_does_not_fit_is_refused(name, kind):
    misfits.call(name, misfits.fitting()[name], placed(kind))
    for label, fits, arguments in misfits.calls(name):
        assert misfits.is_refused(name, arguments, placed(kind)) != fits, label


@versions
@pytest.mark.parametrize("kept_low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arrays_with_gaps_give_what_contiguous_ones_give(name, kept_low, kind):
    arguments = misfits.fitting()[name]
    arguments = misfits.in_low_precision(name, arguments) if kept_low else arguments
    expected = leaves(misfits.call(name, arguments, placed(kind)))
    for argument, array in arguments.items():
        if isinstance(array, np.ndarray):
            actual = leaves(misfits.call(name, arguments | {argument: spread(array)}, placed(kind)))
            for one, other in zip(actual, expected, strict=True):
                bound = 0.02 if kept_low else 1e-6
                np.testing.assert_allclose(one, other, rtol=bound, atol=bound, err_msg=argument)


def leaves(x: Any) -> list[Any]:
    if isinstance(x, dict | list | tuple):
        return [leaf for item in (x.values() if isinstance(x, dict) else x) for leaf in leaves(item)]
    return [] if x is None or isinstance(x, str) else [np.asarray(x, np.float64)]


@pytest.mark.parametrize("width", [0, 3, 5])
def test_data_of_another_width_than_the_model_do_not_train(width):
    module = ShardedModule([Stage("", nn.Linear("a", 4, 8))], SerialComm())
    module.initialize(seed=0)
    x, targets = np.ones((2, 6, width), np.float32), np.zeros((2, 6), np.int64)
    with pytest.raises(ValueError, match=rf"^linear_cross_entropy: .* C={width}"):
        GradAccum(module, 1).accumulate(x, CrossEntropy(targets, 1.0))
