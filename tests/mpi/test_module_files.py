"""A module saved on any ranks with any strategy resumes bit-identically on others with another strategy."""

import os
from functools import partial

import numpy as np
import pytest
import tiny
from checkpoints import FILES, digests

import zero_mpi
from zero_mpi import (
    FULL_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    GradAccum,
    SerialComm,
    ShardedAdamW,
    ShardedModule,
    UsageError,
)
from zero_mpi.checkpoint import parallel_write
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.errors import JobError
from zero_mpi.nn import GELU, Chain, Linear, Stage
from zero_mpi.sharding.precision import FP64

STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]
COUNT, ROWS = 4, 3


def make(comm, strategy=FULL_SHARD, *, seed=0, inputs=7, name="head", **options):
    stages = [
        Stage("body", Chain(Linear("body", inputs, 33, bias=True, std=0.3), GELU())),
        Stage(name, Linear(name, 33, 5, bias=True, std=0.3)),
    ]
    module = ShardedModule(stages, comm, strategy, **options)
    module.initialize(seed)
    return module, ShardedAdamW(module, lr=1e-2)


def criterion(y):
    return float(np.square(y, dtype=np.float64).sum()), 2 * y


def train(optimizer, steps):
    accum, losses, kind = GradAccum(optimizer.module, COUNT), [], optimizer.module.precision.compute
    for step in steps:
        for number in accum:
            if number is None:
                accum.accumulate(None)
                continue
            x = np.random.default_rng((step, number)).standard_normal((ROWS, 7)).astype(kind)
            accum.accumulate(x, criterion)
        losses.append(accum.total_loss())
        optimizer.step(max_norm=1.0)
    return losses


def saved(comm, folder, strategy=FULL_SHARD, steps=2, **options):
    module, optimizer = make(comm, strategy, **options)
    train(optimizer, range(steps))
    return zero_mpi.save(folder, module, optimizer)


@pytest.fixture
def alone(exact, ranks_folder):
    return saved(SerialComm(), ranks_folder / f"alone{exact.rank}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_files_are_those_of_one_process(exact, strategy, ranks_folder, alone):
    folder = saved(exact, ranks_folder / "deep" / "all", strategy)
    assert digests(folder) == digests(alone)
    assert sorted(os.listdir(folder.parent)) == ["all"]


@pytest.mark.parametrize("options", [{}, {"by_rows": True}, {"bucket_mb": 1e-3}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_going_on_has_the_bits_of_a_run_without_a_break(exact, strategy, options, alone):
    _, unbroken = make(SerialComm())
    expected = train(unbroken, range(4))[2:]
    module, optimizer = make(exact, strategy, seed=9, **options)
    train(optimizer, [7])  # load replaces these values
    assert zero_mpi.load(alone, module, optimizer) == 2
    assert (optimizer.steps, optimizer.skipped) == (2, 0)
    assert train(optimizer, [2, 3]) == expected
    assert tiny.digest(module.state_dict()) == tiny.digest(unbroken.module.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float64_goes_on_from_its_own_masters_and_states(exact, strategy, ranks_folder):
    one = saved(SerialComm(), ranks_folder / f"wide{exact.rank}", precision=FP64)
    assert digests(saved(exact, ranks_folder / "deep" / "wide", strategy, precision=FP64)) == digests(one)
    model, state = (GGUFFile.open(one / name) for name in FILES)
    assert {spec.type.name for spec in model.tensors.values()} == {"F32"}
    assert {spec.type.name for spec in state.tensors.values()} == {"F64"}
    _, unbroken = make(SerialComm(), precision=FP64)
    expected = train(unbroken, range(4))[2:]
    for options in ({}, {"by_rows": True}):
        module, optimizer = make(exact, strategy, seed=9, precision=FP64, **options)
        assert zero_mpi.load(one, module, optimizer) == 2
        assert train(optimizer, [2, 3]) == expected
        assert tiny.digest(module.state_dict()) == tiny.digest(unbroken.module.state_dict())
        assert digests(zero_mpi.save(ranks_folder / "deep" / "rows", module, optimizer)) != digests(one)
    with pytest.raises(UsageError, match=r"optimizer\.gguf"):
        zero_mpi.load(one, *make(exact, strategy))


def test_what_save_wrote_is_replaced(exact, ranks_folder):
    folder = saved(exact, ranks_folder / "all", steps=1)
    first = exact.broadcast_object(digests(folder))
    second = saved(exact, str(ranks_folder / "all"), steps=2)
    assert second == folder
    assert digests(second) != first
    assert os.listdir(ranks_folder) == ["all"]


def test_frozen_parameters_have_no_moments_and_come_back(exact, ranks_folder):
    folder = saved(exact, ranks_folder / "all", frozen=["body.*"])
    module, optimizer = make(exact, frozen=["body.*"], seed=3)
    zero_mpi.load(folder, module, optimizer)
    serial, _ = make(SerialComm())
    assert tiny.digest({"w": module.all_gather_param("body.weight")}) == tiny.digest(
        {"w": serial.all_gather_param("body.weight")}
    )
    with pytest.raises(UsageError, match=r"missing optimizer\.adam\.first_moments\.body\.weight"):
        zero_mpi.load(folder, *make(exact))


def refused(comm, call, message, kind=UsageError):
    with pytest.raises(kind, match=message):
        call()
    assert comm.allgather_object("on") == ["on"] * comm.size


def test_load_says_what_does_not_fit(exact, ranks_folder):
    folder = saved(exact, ranks_folder / "all")
    load = partial(zero_mpi.load, folder)
    names = r"model\.gguf: .*missing tail\.weight, tail\.bias; surplus head\.weight, head\.bias"
    refused(exact, partial(load, *make(exact, name="tail")), names)
    shape = r"body\.weight: expected shape \(33, 6\), found \(33, 7\)"
    refused(exact, partial(load, *make(exact, inputs=6)), shape)
    nowhere = partial(zero_mpi.load, ranks_folder / "nowhere", *make(exact))
    refused(exact, nowhere, r"nowhere/model\.gguf: no such file")


def test_save_refuses_what_it_would_destroy_or_cannot_write(exact, ranks_folder):
    module, optimizer = make(exact)
    if exact.rank == 0:
        (ranks_folder / "file").touch()
        (ranks_folder / "mine").mkdir()
        (ranks_folder / "mine" / "thesis.tex").touch()
    save = partial(zero_mpi.save, module=module, optimizer=optimizer)
    refused(exact, partial(save, ranks_folder / "file"), "is a file")
    refused(exact, partial(save, ranks_folder / "mine"), r"found thesis\.tex")
    refused(exact, partial(save, ranks_folder / "file" / "sub"), "file", (UsageError, JobError))
    refused(exact, partial(save, None), "expected the name of a folder, got None", ValueError)
    long = partial(zero_mpi.save, ranks_folder / "all", *make(exact, name="h" * 40))
    refused(exact, long, "expected a name of 1 to 63 bytes, found")
    other = partial(zero_mpi.save, ranks_folder / "all", module, make(exact)[1])
    refused(exact, other, "expected the optimizer of this module", ValueError)
    for call in (zero_mpi.save, zero_mpi.load):  # both refuse a user's optimizer and a missing optimizer
        for comm in (exact, None):
            wrong = partial(call, ranks_folder / "all", module, comm)
            refused(exact, wrong, "ShardedAdamW.*state_dict", ValueError)
    exact.barrier()
    assert sorted(os.listdir(ranks_folder)) == ["file", "mine"]


def full(output, *arguments):
    output.problem = OSError(28, "No space left on device", "model.gguf")


def test_a_save_that_fails_leaves_what_was_there(exact, ranks_folder, monkeypatch):
    folder = saved(exact, ranks_folder / "all", steps=1)
    before = exact.broadcast_object(digests(folder))
    module, optimizer = make(exact)
    with monkeypatch.context() as patch:
        patch.setattr(parallel_write.Output, "write", full)
        save = partial(zero_mpi.save, folder, module, optimizer)
        refused(exact, save, "save: .*cannot write model.gguf: No space left on device; .*all", JobError)
    exact.barrier()
    assert digests(folder) == before
    assert os.listdir(ranks_folder) == ["all"]


@pytest.mark.world(2, 3)
def test_ranks_that_name_different_folders_are_told(exact, ranks_folder):
    call = partial(zero_mpi.save, ranks_folder / f"rank{exact.rank}", *make(exact))
    refused(exact, call, "the ranks differ in save: .* has the folder")
