"""Operations refuse arrays whose shapes or types do not fit, in the reference and the compiled version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import misfits
import numpy as np
import pytest

from zero_mpi import GradAccum, SerialComm, ShardedModule, nn, ops
from zero_mpi.nn import CrossEntropy, Stage
from zero_mpi.ops import low_precision, registry, trial
from zero_mpi.ops.low_precision import BFLOAT16
from zero_mpi.ops.registry import OPERATIONS
from zero_mpi.plan import fake_ops
from zero_mpi.plan.workspaces import Compiled

ops.prepare(kind=BFLOAT16)


class Plain(np.ndarray):
    """Arrays that the reference computes with, wherever compiled operations are installed."""


for operation in OPERATIONS.values():
    operation.register(Plain, operation.dispatch(object))


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
    for label, fits, given in misfits.calls(name):
        assert misfits.is_refused(name, given, placed(kind)) != fits, label


@versions
@pytest.mark.parametrize("kept_low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arrays_with_gaps_give_what_contiguous_ones_give(name, kept_low, kind):
    given = misfits.fitting()[name]
    given = misfits.in_low_precision(name, given) if kept_low else given
    expected = leaves(misfits.call(name, given, placed(kind)))
    for argument, whole in given.items():
        if isinstance(whole, np.ndarray):
            found = leaves(misfits.call(name, given | {argument: spread(whole)}, placed(kind)))
            for one, other in zip(found, expected, strict=True):
                bound = 0.02 if kept_low else 1e-6
                np.testing.assert_allclose(one, other, rtol=bound, atol=bound, err_msg=argument)


def leaves(x: Any) -> list[Any]:
    if isinstance(x, dict | list | tuple):
        return [leaf for item in (x.values() if isinstance(x, dict) else x) for leaf in leaves(item)]
    return [] if x is None or isinstance(x, str) else [np.asarray(x, np.float64)]


@versions
def test_what_attention_kept_of_other_sequences_is_refused(kind):
    name = "causal_attention_backward"
    given = misfits.fitting()[name]
    for lengths in ((1, 3, 7), (2, 2, 7), (2, 3, 6)):
        batch, queries, keys = map(slice, lengths)
        q, k, v = given["q"][batch, queries], given["k"][batch, keys], given["v"][batch, keys]
        kept = ops.causal_attention(*map(placed(kind), (q, k, v)), 0.7)[1]
        assert misfits.is_refused(name, given | {"p": kept}, placed(kind)), lengths


def test_a_definition_and_a_version_are_all_that_an_operation_needs(monkeypatch):
    """Dispatch, checks, low precision, what a plan counts and the trial follow from the two decorators."""
    monkeypatch.setattr(registry, "OPERATIONS", made := {})
    monkeypatch.setattr(registry, "VERSIONS", {})
    monkeypatch.setattr(low_precision, "ROLES", {})

    @registry.operation("x ... C, w C, dw?+ C real -> ... C, ... 1 wide")
    def weighed(x: Any, w: Any, power: float, dw: Any = None) -> Any:
        return x * w, x.sum(axis=-1, keepdims=True)

    calls = []

    @registry.implements(weighed, low=())
    def faster(x: Any, w: Any, power: float, dw: Any = None) -> Any:
        calls.append(x.dtype)
        return weighed(x, w, power, dw)

    monkeypatch.setattr(ops, "weighed", made["weighed"], raising=False)
    x, w = np.ones((2, 5), BFLOAT16), np.ones(5, BFLOAT16)
    assert ops.weighed(x, w, 1.0)[0].dtype == BFLOAT16
    registry.register(np.ndarray)
    assert [y.dtype for y in ops.weighed(x, w, 1.0)] == [BFLOAT16, np.float32]
    assert calls == [np.float32]
    with pytest.raises(ValueError, match=r"^weighed: .*w \(C=5\)"):
        ops.weighed(x, w[1:], 1.0)
    memory = Compiled()
    fakes = fake_ops.one_pass(ops.weighed, memory.outside((9, 5)), memory.outside((5,)), 1.0)
    assert [y.shape for y in fakes] == [(9, 5), (9, 1)]
    assert memory.moved == 4 * (45 + 5 + 45 + 9)
    monkeypatch.setattr(trial, "OPERATIONS", made)
    shapes = [y.shape for y in trial.others(trial.numbers)]
    assert shapes == 2 * [(67, 193), (193,), (193,), (67, 193), (67, 1)] + 2 * [
        (67, 193),
        (193,),
        (67, 193),
        (67, 1),
    ]


def test_an_array_of_another_type_is_named_with_what_was_expected():
    x, w = np.zeros((2, 5), np.float32), np.zeros((8, 4), np.float32)
    said = r"^linear: .* w \(O=8, C=5\) .* x \(2, 5\) float32, w \(8, 4\) float32$"
    with pytest.raises(ValueError, match=said):
        ops.linear(x, w)


@pytest.mark.parametrize("width", [0, 3, 5])
def test_data_of_another_width_than_the_model_do_not_train(width):
    module = ShardedModule([Stage("", nn.Linear("a", 4, 8))], SerialComm())
    module.initialize(seed=0)
    x, targets = np.ones((2, 6, width), np.float32), np.zeros((2, 6), np.int64)
    with pytest.raises(ValueError, match=rf"^linear_cross_entropy: .* C={width}"):
        GradAccum(module, 1).accumulate(x, CrossEntropy(targets, 1.0))
