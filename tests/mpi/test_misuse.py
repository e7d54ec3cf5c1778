"""Misuse of the API raises a ValueError on all ranks, which names the mistake, and no rank hangs.

Each case is a call of a public name. After the call all ranks start a collective of the same
communicator, which would hang or give another value if a rank had started another collective.
"""

from functools import partial

import numpy as np
import pytest
import tiny
from mpi4py import MPI
from test_module_files import refused

from zero_mpi import (
    DDP,
    FULL_SHARD,
    NO_SHARD,
    AdamW,
    GradAccum,
    MPIComm,
    Partition,
    ShardedAdamW,
    ShardedModule,
    ShardedOptimizer,
    Strategy,
    clip_grad_norm,
    cross_entropy,
    tracing,
)
from zero_mpi.models import Llama
from zero_mpi.nn import GELU, Layer, Linear, Param, Stage
from zero_mpi.sharding.precision import BF16

SIZES = {"layers": 1, "dim": 8, "heads": 2, "context": 4, "vocab_size": 16}
MODEL = Llama.from_flags(SIZES)
TOKENS = np.arange(8).reshape(2, 4)
SIZE = MPI.COMM_WORLD.Get_size()
RANK = MPI.COMM_WORLD.Get_rank()
ODD = SIZE - 1
several = pytest.mark.world(2, 3, 4, 8)
fails = partial(refused, kind=ValueError)


class Odd(Layer):
    def __init__(self, **params):
        self._params = params

    def params(self):
        return self._params

    def forward(self, p, x):
        return x, None


class Kit:
    def __init__(self, comm, strategy=FULL_SHARD):
        self.comm = comm
        self.module = ShardedModule(MODEL.stages(), comm, strategy)
        self.module.initialize(seed=0)
        self.optimizer = ShardedAdamW(self.module, lr=1e-2)
        self.accum = GradAccum(self.module, steps=SIZE + 1)  # two rounds; only rank 0 works in the second
        self.state = self.module.state_dict()

    def round(self):
        criterion = partial(cross_entropy, targets=TOKENS, scale=1e-2)
        idle = self.accum.next_micro_batch is None
        self.accum.accumulate(None if idle else TOKENS, criterion)

    def rounds(self, times=1):
        for _ in range(2 * times):
            self.round()

    def forward(self):
        return self.module.forward(TOKENS)

    def load(self, change):
        self.module.load_state_dict({name: change(value) for name, value in self.state.items()})


@pytest.fixture(scope="module")
def comm():
    return MPIComm()


@pytest.fixture
def kit(comm):
    return Kit(comm)


def stages(**params):
    return [Stage("odd", Odd(**params))]


MODULES = {
    "no stages": (lambda c: ShardedModule([], c), r"stages: .*got none"),
    "stages: a model": (lambda c: ShardedModule(MODEL, c), "expected a list of Stage.*got a Llama"),
    "no parameters": (lambda c: ShardedModule([Stage("a", GELU())], c), "expected a model with parameters"),
    "comm: None": (lambda c: ShardedModule(MODEL.stages(), None), r"comm: expected a communicator.*got None"),
    "precision": (lambda c: ShardedModule(MODEL.stages(), c, precision="bf16"), "a Precision .*'bf16'"),
    "bucket: nan": (lambda c: DDP(MODEL.stages(), c, bucket_mb=np.nan), "bucket_mb: .*got nan"),
    "frozen: a text": (lambda c: ShardedModule(MODEL.stages(), c, frozen="blk.*"), r"got 'blk\.\*'"),
    "offload": (
        lambda c: ShardedModule(MODEL.stages(), c, precision=BF16, offload_masters=True),
        "expected a GPU",
    ),
    "0-d": (lambda c: ShardedModule(stages(w=Param(())), c), r"parameter w: .*got \(\)"),
    "init": (lambda c: ShardedModule(stages(w=Param((3,), "one")), c), "init 'one' is not known"),
    "shapes": (
        lambda c: ShardedModule([Stage("a", Linear("a", 2, 3)), Stage("b", Linear("a", 3, 2))], c),
        r"parameter a\.weight has the shapes \(3, 2\) and \(2, 3\)",
    ),
    "trace: place": (lambda c: tracing(c, "/nowhere/a.json").__enter__(), "cannot write there"),
}


@pytest.mark.parametrize("case", MODULES)
def test_what_cannot_be_made_is_refused(comm, case):
    fails(comm, partial(MODULES[case][0], comm), MODULES[case][1])


USES = {
    "accum: module": (lambda k: GradAccum(MODEL, 4), r"GradAccum: .*got a Llama"),
    "accum: text": (lambda k: GradAccum(k.module, "4"), "GradAccum: micro-batches.*whole number.*got '4'"),
    "adam: module": (lambda k: ShardedAdamW(k.module.parameters()), r"module: .*got a list"),
    "adam: lr nan": (lambda k: ShardedAdamW(k.module, lr=np.nan), "lr: .*got nan"),
    "adam: offload": (lambda k: ShardedAdamW(k.module, offload="gpu"), "--offload gpu: expected one of"),
    "step at first": (lambda k: k.optimizer.step(), r"GradAccum\.accumulate"),
    "step in between": (lambda k: (k.round(), k.optimizer.step()), "last round"),
    "step twice": (lambda k: (k.rounds(), k.optimizer.step(), k.optimizer.step()), "no gradients yet"),
    "step: norm": (lambda k: (k.rounds(), k.optimizer.step(max_norm=0)), "step: max_norm: .*above 0.*got 0"),
    "clip at first": (lambda k: clip_grad_norm(k.module, 1.0), "clip_grad_norm: there are no gradients yet"),
    "one round more": (lambda k: k.rounds(2), "all 2 rounds of this step are done; call ShardedAdamW.step"),
    "no criterion": (lambda k: k.accum.accumulate(TOKENS), "accumulate needs a criterion"),
    "no micro-batch": (lambda k: k.accum.accumulate(None), "needs a micro-batch; pass its input"),
    "a list": (lambda k: k.accum.accumulate(TOKENS.tolist(), len), "forward: expected an array, got a list"),
    "backward at first": (lambda k: k.module.backward(None), "backward needs a forward"),
    "backward twice": (lambda k: (k.module.backward(k.forward()), k.module.backward(1)), "a forward"),
    "backward None": (lambda k: (k.forward(), k.module.backward(None)), "a gradient.*None"),
    "contributors": (lambda k: k.module.backward(k.forward(), contributors=-1), r"contributors: .*got -1"),
    "state empty": (lambda k: k.module.load_state_dict({}), "missing token_embd.weight.* more; surplus none"),
    "state surplus": (lambda k: k.module.load_state_dict(k.state | {"a": 1, 2: 3}), "surplus a, 2"),
    "state shape": (lambda k: k.load(lambda x: x.T[None]), r"token_embd.weight: .*\(16, 8\).*\(1, 8, 16\)"),
    "shards size": (lambda k: k.module.update_shards(np.zeros(1)), "update_shards: expected a flat array of"),
    "name": (lambda k: k.module.all_gather_param("w"), "parameter 'w' is not known"),
    "prefetch twice": (lambda k: [k.module.prefetch_forward_params() for _ in range(2)], "already started"),
    "names: a text": (lambda k: k.module.initialize(0, "output.weight"), r"names: .*output\.weight"),
    "names: a typo": (lambda k: k.module.initialize(0, ["output.wieght"]), r"names: .*output\.wieght"),
    "targets shape": (lambda k: cross_entropy(np.ones((2, 4, 16)), TOKENS[0]), r"\(2, 4\), got \(4,"),
    "targets above": (lambda k: cross_entropy(np.ones((2, 4, 7)), TOKENS), "targets from 0 to 6.*got 0 to 7"),
    "scale nan": (lambda k: cross_entropy(np.ones((2, 4, 16)), TOKENS, np.nan), "scale: .*got nan"),
    "strategy": (lambda k: Strategy("mine", True, False, False), "mine: shards_parameters needs"),
    "partition": (lambda k: Partition(-1, 2), "Partition: length: .*at least 0, got -1"),
}


@pytest.mark.parametrize("case", USES)
def test_wrong_use_is_refused(kit, case):
    fails(kit.comm, partial(USES[case][0], kit), USES[case][1])


FILLED = {  # label -> (function that computes, function that gives parameters values)
    "forward": (lambda m: m.forward(TOKENS), lambda m: m.initialize(0)),
    "both": (
        lambda m: m.forward_backward(TOKENS, TOKENS, 1e-2),
        lambda m: m.load_state_dict({name: np.ones(p.shape) for name, p in m.params.items()}),
    ),
    "evaluate": (
        lambda m: m.evaluate(TOKENS, TOKENS, 1e-2),
        lambda m: m.update_shards(np.concatenate([np.zeros(0), *m.parameters()])),
    ),
    "given gradients": (
        lambda m: m.add_gradients({name: np.zeros(p.shape) for name, p in m.params.items()}),
        lambda m: m.broadcast_updated_params(),
    ),
}


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD], ids=["full-shard", "no-shard"])
@pytest.mark.parametrize("way", FILLED)
def test_no_micro_batch_goes_through_parameters_without_values(comm, way, strategy):
    module, (compute, fill) = ShardedModule(MODEL.stages(), comm, strategy), FILLED[way]
    names = list(module.params)
    fails(comm, lambda: compute(module), "initialize, load_state_dict or zero_mpi.load")
    module.initialize(0, names[:-1])
    fails(comm, lambda: compute(module), names[-1])
    fill(module)
    compute(module)
    module.sync_gradients()


def test_a_step_that_was_forgotten_begins_anew(comm):
    plain, fresh = Kit(comm), Kit(comm)
    fresh.round()
    fresh.module.zero_gradients()
    for kit in (plain, fresh):
        kit.rounds()
    assert fresh.accum.total_loss() == plain.accum.total_loss()
    assert fresh.optimizer.step() == plain.optimizer.step()
    assert tiny.digest(fresh.module.state_dict()) == tiny.digest(plain.module.state_dict())


mine = partial(lambda usual, odd: odd if RANK == ODD else usual)
OTHER = Llama.from_flags(SIZES | {"ffn": 64})
DEEP = Llama.from_flags(SIZES | {"layers": 2})
DIFFERENT = {
    "strategy": (lambda c: ShardedModule(MODEL.stages(), c, mine(FULL_SHARD, NO_SHARD)), "the strategy"),
    "prefetch": (lambda c: ShardedModule(MODEL.stages(), c, prefetch=mine(1, 2)), "prefetch 2"),
    "shapes": (lambda c: ShardedModule(mine(MODEL, OTHER).stages(), c), "parameter blk.0.ffn_gate.weight"),
    "depth": (lambda c: ShardedModule(mine(MODEL, DEEP).stages(), c), "stage 2 blk.1"),
    "frozen": (
        lambda c: ShardedModule(MODEL.stages(), c, frozen=mine([], ["output.*"])),
        "parameter output.weight .*frozen",
    ),
    "micro-batches": (lambda c: GradAccum(ShardedModule(MODEL.stages(), c), mine(4, 5)), "micro-batches 5"),
    "lr": (lambda c: ShardedAdamW(ShardedModule(MODEL.stages(), c), lr=mine(0.1, 0.2)), "lr 0.2"),
    "seed": (lambda c: ShardedModule(MODEL.stages(), c).initialize(mine(0, 1)), "seed 1"),
    "root": (lambda c: DDP(MODEL.stages(), c).broadcast_parameters(mine(0, ODD)), f"root {ODD}"),
}


@several
@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_differ_all_learn_of_it(comm, case):
    call, message = DIFFERENT[case]
    fails(comm, partial(call, comm), f"the ranks differ in .*: rank {ODD} on .* has .*{message}.*, ranks? 0")


@several
def test_rules_with_functions_do_not_differ(comm):
    rule = AdamW()
    vars(rule)["schedule"] = lambda step: 1 / step
    module = ShardedModule(MODEL.stages(), comm)
    ShardedOptimizer(module, rule)
    vars(rule)["schedule"] = mine(len, abs)
    fails(comm, lambda: ShardedOptimizer(module, rule), "schedule abs")


@several
@pytest.mark.parametrize(
    "call",
    [
        lambda c: ShardedModule(mine(MODEL.stages(), []), c),
        lambda c: GradAccum(ShardedModule(MODEL.stages(), c), mine(4, "4")),
        lambda c: ShardedAdamW(ShardedModule(MODEL.stages(), c), lr=mine(0.1, None)),
        lambda c: ShardedModule(MODEL.stages(), c).initialize(mine(0, "0")),
        lambda c: DDP(MODEL.stages(), c).broadcast_parameters(mine(0, SIZE)),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(comm, call):
    fails(comm, partial(call, comm), "expected" if RANK == ODD else f"^rank {ODD}: .*expected")
