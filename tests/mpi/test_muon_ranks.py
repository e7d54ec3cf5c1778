"""Muon on any number of ranks is bit-identical to one rank, with every strategy, exact transport and
precision, and after a resume. Weights match a NumPy program in float64."""

import shutil

import numpy as np
import pytest
import tiny
from mpi4py import MPI

import zero_mpi
from zero_mpi.comm.shared.comm import SharedComm
from zero_mpi.sharding.precision import BF16, FP32

WORLD = MPI.COMM_WORLD
MODEL = tiny.MODELS["llama"]
MATRICES = [name for name, p in MODEL.params().items() if name.startswith("blk.") and len(p.shape) > 1]
STRATEGIES = [zero_mpi.FULL_SHARD, zero_mpi.SHARD_GRAD_OP, zero_mpi.NO_SHARD, zero_mpi.HYBRID_SHARD]
PRECISIONS = {"fp32": FP32, "bf16": BF16}
STEPS, ROUNDS, LR, DECAY = 4, 4, 1e-2, 0.1
COMMS = {"mpi": zero_mpi.MPIComm, "fast": lambda: zero_mpi.MPIComm(exact=False), "shared": SharedComm}

kinds = pytest.mark.parametrize("precision", PRECISIONS)
strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)


def made(comm, strategy=zero_mpi.FULL_SHARD, precision="fp32", ema=None):
    module = zero_mpi.ShardedModule(
        MODEL.stages(), comm, strategy, whole=MATRICES, precision=PRECISIONS[precision], bucket_mb=0.01
    )
    module.initialize(0)
    rules = {
        "*": zero_mpi.AdamW(),
        **dict.fromkeys(MATRICES, zero_mpi.Muon(kind=PRECISIONS[precision].compute)),
    }
    return module, zero_mpi.ShardedOptimizer(module, rules, lr=LR, weight_decay=DECAY, ema=ema)


def trained(module, optimizer, steps):
    accumulator, norms = zero_mpi.GradAccum(module, ROUNDS), []
    for step in steps:
        tiny.run_step(module, accumulator, MODEL, step, ROUNDS)
        norms.append(optimizer.step(max_norm=1.0).grad_norm)
    return norms, tiny.digest(module.state_dict())


@pytest.fixture(scope="module")
def alone():
    return {kind: trained(*made(zero_mpi.SerialComm(), precision=kind), range(STEPS)) for kind in PRECISIONS}


@kinds
@strategies
@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_the_bits_of_one_rank(alone, strategy, precision, transport):
    comm = COMMS[transport]()
    module, optimizer = made(comm, strategy, precision)
    assert trained(module, optimizer, range(STEPS)) == alone[precision]
    # Each matrix has one owner.
    owned = [name for unit in module.units if unit.unit.full_matrices for name in owned_of(unit)]
    assert sorted(name for each in WORLD.allgather(owned) for name in each) == sorted(MATRICES)
    comm.close()


def owned_of(unit):
    segments = unit.unit.segments(unit.part)
    assert all(s.where.stop - s.where.start == unit.unit.params[s.name].size for s in segments)
    return [segment.name for segment in segments]


def test_a_sum_by_the_library_reaches_all_owners(alone):
    comm = COMMS["fast"]()
    module, optimizer = made(comm, zero_mpi.NO_SHARD)
    norms, _ = trained(module, optimizer, range(STEPS))
    assert norms == pytest.approx(alone["fp32"][0], rel=1e-4)
    comm.close()


@strategies
def test_a_run_that_was_saved_goes_on(alone, strategy, tmp_path_factory):
    folder = WORLD.bcast(tmp_path_factory.mktemp("muon") / "state" if WORLD.rank == 0 else None)
    comm = zero_mpi.MPIComm()
    module, optimizer = made(comm, strategy)
    trained(module, optimizer, range(2))
    zero_mpi.save(folder, module, optimizer)
    if WORLD.rank == 0:  # rank 0 alone resumes the checkpoint that all ranks wrote
        second = made(zero_mpi.SerialComm())
        assert zero_mpi.load(folder, *second) == 2
        assert trained(*second, range(2, STEPS))[1] == alone["fp32"][1]
    second = made(comm, zero_mpi.SHARD_GRAD_OP)
    assert zero_mpi.load(folder, *second) == 2
    assert trained(*second, range(2, STEPS))[1] == alone["fp32"][1]
    comm.barrier()
    if WORLD.rank == 0:
        shutil.rmtree(folder.parent)
    comm.close()


def orthogonal(x):
    """Return x after five steps of the polynomial in float64."""
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if turned else x


def test_weights_are_those_of_a_program_in_float64():
    comm = zero_mpi.MPIComm()
    module, optimizer = made(comm)
    accumulator = zero_mpi.GradAccum(module, ROUNDS)
    weights = {name: x.astype(np.float64) for name, x in module.state_dict().items() if name in MATRICES}
    momentum = dict.fromkeys(MATRICES, 0.0)
    for step in range(20):
        tiny.run_step(module, accumulator, MODEL, step, ROUNDS)
        module.sync_gradients()
        owned = {name: g.copy() for name, g in module.named_gradients() if name in MATRICES}
        gradients = {name: g for each in WORLD.allgather(owned) for name, g in each.items()}
        optimizer.step()
        for name, w in weights.items():
            g = gradients[name].reshape(w.shape).astype(np.float64)
            momentum[name] = 0.95 * momentum[name] + 0.05 * g
            o = orthogonal(0.05 * g + 0.95 * momentum[name])
            weights[name] = w * (1 - LR * DECAY) - LR * 0.2 * np.sqrt(max(w.shape)) * o
    for name, w in module.state_dict().items():
        if name in weights:
            assert np.abs(w - weights[name]).max() <= 1e-5 * np.abs(weights[name]).max()
    comm.close()
