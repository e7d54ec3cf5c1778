"""Model whose layers have auxiliary losses and a buffer, to test that interface."""

import numpy as np
import tiny

from zero_mpi import FULL_SHARD, GradAccum, ShardedAdamW, ShardedModule
from zero_mpi.nn import Chain, Layer, Linear, Param, Recompute, Stage, Tally, batch_of

WIDTH, ROWS, COUNT = 33, 3, 5


def square(sums):
    return sums["parts"] ** 2


class Pressed(Layer):
    """Layer y = w (x - center). Losses: (sum over layers of mean y^2) squared, and mean y^2 of each layer.

    The buffer `center` moves a tenth of the way to the mean of x over all micro-batches of a step.
    """

    def __init__(self, name):
        self.weight, self.center = f"{name}.weight", f"{name}.center"

    def params(self):
        return {self.weight: Param((WIDTH,), "ones"), self.center: Param((WIDTH,), "zeros", buffer=True)}

    def tallies(self):
        extra = {f"{self.center}.sum": Tally((WIDTH,)), f"{self.center}.rows": Tally()}
        return {"pressure": Tally(scale=0.3, value=square), "size": Tally(scale=0.02), **extra}

    def update(self, buffers, sums):
        mean = sums[f"{self.center}.sum"] / sums[f"{self.center}.rows"]
        buffers[self.center] += 0.1 * (mean - buffers[self.center])

    def forward(self, p, x):
        z = x - p[self.center]
        y = z * p[self.weight]
        wide, batch = np.promote_types(y.dtype, np.float32), batch_of(p)
        part, total = np.square(y, dtype=wide).mean(), x.sum(axis=0, dtype=wide)
        batch.report(self.center, parts=part, size=part)
        batch.report(self.center, **{f"{self.center}.sum": total, f"{self.center}.rows": len(x)})
        return y, z

    def backward(self, p, saved, dy, g):
        batch, y = batch_of(p), saved * p[self.weight]
        slope = batch.factors.get("pressure", 0) * 2 * batch.sums["parts"] + batch.factors.get("size", 0)
        dy = dy + y.dtype.type(slope * 2 / y.size) * y
        if self.weight in g:
            g[self.weight] += (dy * saved).sum(axis=0)
        return dy * p[self.weight]


def stages(recompute=False):
    body = Chain(
        Linear("body.1", 7, WIDTH, std=0.3), Pressed("body"), Linear("body.2", WIDTH, WIDTH, std=0.2)
    )
    other = Pressed("other")
    return [
        Stage("body", Recompute(body) if recompute else body),
        Stage("other", Recompute(other) if recompute else other),
        Stage("head", Linear("head", WIDTH, 5, std=0.3)),
    ]


def make(comm, strategy=FULL_SHARD, *, recompute=False, **options):
    module = ShardedModule(stages(recompute), comm, strategy, **options)
    module.initialize(0)
    return module, ShardedAdamW(module, lr=1e-2)


def read(step, number):
    return np.random.default_rng((step, number)).standard_normal((ROWS, 7)).astype(np.float32)


def criterion(y):
    return 1e-3 * float(np.square(y, dtype=np.float64).sum()), y.dtype.type(2e-3) * y


def rounds(accum, step):
    kind = accum.module.precision.compute
    for number in accum:
        accum.accumulate(*((None,) if number is None else (read(step, number).astype(kind), criterion)))


def losses(module):
    sums = module.tallies.sums(module.comm)
    return {name: float(sums[name]) for name in module.tallies.scales}


def train(optimizer, steps):
    module = optimizer.module
    accum, records = GradAccum(module, COUNT), []
    for step in steps:
        with np.errstate(all="ignore"):  # float16 overflows until a loss scale is found
            rounds(accum, step)
        records.append((accum.total_loss(), losses(module)))
        records.append(optimizer.step(max_norm=1.0).grad_norm)
    return records, tiny.digest(module.state_dict())
