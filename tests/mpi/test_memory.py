"""A rank keeps only its shards, and a second step reuses the buffers of the first."""

import tiny

from zero_mpi import FULL_SHARD, GradAccum, ShardedAdamW
from zero_mpi.models import Llama

QUANTUM = 1024
DEEP = Llama.from_flags(tiny.LLAMA | {"layers": 6, "tied": False})


def test_an_evaluation_leaves_nothing_gathered(exact):
    module = tiny.make(exact, DEEP, FULL_SHARD, prefetch=2)
    module.forward(tiny.micro_batch(0, 0, DEEP)[0], training=False)
    assert not module.parameter_pool._lent
    assert not any(unit.parameters.full is not None for unit in module.units)


def test_parameters_gradients_and_moments_are_one_nth(exact):
    module = tiny.make(exact, DEEP, FULL_SHARD)
    optimizer, count = ShardedAdamW(module), exact.size + 1
    tiny.run_step(module, GradAccum(module, count), DEEP, 0, count)
    optimizer.step()
    total = sum(unit.unit.length for unit in module.units)
    limit = total / exact.size + QUANTUM * len(module.units)  # slices of a unit differ by at most one quantum
    size = sum(unit.parameters.master_shard.size for unit in module.units)
    assert size <= limit
    assert sum(exact.allgather_object(size)) == total
    assert sum(unit.gradient.sum.size for unit in module.units) == size
    assert optimizer.memory_bytes() == 2 * 4 * size
    assert module.shard_memory_bytes == 4 * size
    assert module.replicated_memory_bytes == 4 * total


def test_a_second_step_allocates_no_buffer(exact):
    module = tiny.make(exact, DEEP, FULL_SHARD, prefetch=2)
    optimizer = ShardedAdamW(module)
    accumulator = GradAccum(module, exact.size)
    sizes = []
    for step in range(3):
        tiny.run_step(module, accumulator, DEEP, step, exact.size)
        optimizer.step()
        sizes.append((module.parameter_pool.nbytes, module.gradient_pool.nbytes))
    assert sizes[0] == sizes[1] == sizes[2]
