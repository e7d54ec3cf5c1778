"""Shared memory: no rank reads data before they are written, or writes data while other ranks read them.

Random delays between all operations reveal missing waits. The tests of all transports (bits, collectives,
checkpoints) also use this transport, through the fixture `exact`.
"""

import gc
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
from recording import RecordingComm

from zero_mpi import FULL_SHARD, SHARD_GRAD_OP, SerialComm, ShardedAdamW, ShardedModule, clip_grad_norm
from zero_mpi.comm import Partition, kinds
from zero_mpi.comm.nodes.comm import NodesComm
from zero_mpi.comm.shared.comm import SharedComm
from zero_mpi.comm.shared.memory import MPI, NodesApart, NoSharedMemory
from zero_mpi.comm.topology import PRETEND
from zero_mpi.config.settings import Config
from zero_mpi.device.arrays import BufferPool
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.models import GPT2, Llama
from zero_mpi.sharding.strategy import STRATEGIES
from zero_mpi.train.setup import choose_transport, layout_config

CONFIG = tiny.MODELS["llama"]
SIZE = MPI.COMM_WORLD.Get_size()
DEEP = Llama.from_flags(tiny.LLAMA | {"layers": 5, "tied": True})
strategies = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))


class Dawdling(RecordingComm):
    """Communicator that sleeps at random before or after operations that concern other ranks."""

    def __init__(self, inner, seed, longest=2e-3):
        super().__init__(inner)
        self.draw, self.longest = random.Random(f"{seed} {inner.rank}"), longest

    def shard_group(self):
        owners = super().shard_group()
        return owners if owners is self else Dawdling(owners, f"owner {self.rank}", self.longest)

    def dawdle(self):
        if self.draw.random() < 0.4:
            time.sleep(self.draw.random() * self.longest)

    def reduce_scatter(self, *args, **options):
        self.dawdle()
        return super().reduce_scatter(*args, **options)

    def signal_written(self):
        self.dawdle()
        super().signal_written()

    def wait_written(self):
        super().wait_written()
        self.dawdle()

    def barrier_readers(self):
        self.dawdle()
        super().barrier_readers()

    def sum_vector(self, values):
        self.dawdle()
        total = super().sum_vector(values)
        self.dawdle()
        return total

    def progress(self):
        self.dawdle()
        super().progress()


def spoil_what_is_given_back(monkeypatch):
    give = BufferPool.give

    def spoil_and_give(pool, buffer):
        buffer.fill(np.nan)
        give(pool, buffer)

    monkeypatch.setattr(BufferPool, "give", spoil_and_give)


def restless(comm, config, strategy, *, steps=4, micro_batches=5, **options):
    """Train, with every kind of read and write of parameters between the steps; return all results."""
    module = tiny.make(comm, config, strategy, **options)
    optimizer = ShardedAdamW(module, lr=1e-2)
    accumulator, records = tiny.GradAccum(module, micro_batches), []
    x, _ = tiny.micro_batch(9, 9, config)
    for step in range(steps):
        if step == 1 and strategy is FULL_SHARD:
            module.prefetch_forward_params()
        tiny.run_step(module, accumulator, config, step, micro_batches)
        if step == 2:
            records.append(clip_grad_norm(module, 0.1))
        records.append((accumulator.total_loss(), optimizer.step(max_norm=1.0).grad_norm))
        if step % 2:
            records.append(module.forward(x, training=False).tobytes())
        if step == 1:
            records.append(tiny.digest(module.state_dict()))
            module.forward(x)  # without a backward
            module.load_state_dict({name: 0.5 * array for name, array in module.state_dict().items()})
            records.append(module.forward(x, training=False).tobytes())
        if step == 2:
            module.update_shards(2 * np.concatenate([np.zeros(0, np.float32), *module.parameters()]))
    return records, tiny.digest(module.state_dict())


@pytest.mark.timeout_seconds(240)
@strategies
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_dawdle_change_nothing(shared, strategy, seed, monkeypatch):
    options = [
        {"prefetch": 2, "micro_batches": 5},
        {"recompute": True, "frozen": ["blk.1.*"], "micro_batches": shared.size},
        {"micro_batches": 1, "prefetch": 0},
        {"micro_batches": 5, "by_rows": True},
    ][seed]
    expected = restless(SerialComm(), DEEP, strategy, bucket_mb=0.01, **options)
    spoil_what_is_given_back(monkeypatch)
    assert restless(Dawdling(shared, seed), DEEP, strategy, bucket_mb=0.01, **options) == expected


def late(rank, comm, seconds=0.1):
    if comm.rank == rank:
        time.sleep(seconds)


@pytest.mark.parametrize("who", [0, -1])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
def test_nobody_reads_what_a_late_rank_has_not_written(shared, strategy, who):
    x, _ = tiny.micro_batch(0, 0, CONFIG)
    module = tiny.make(shared, CONFIG, strategy)
    module.forward(x, training=False)
    new = tiny.make(SerialComm(), CONFIG, seed=5)
    flat = np.concatenate(tiny.make(shared, CONFIG, strategy, seed=5).parameters())
    module.drop_gathered()
    late(who % shared.size, shared)
    start = 0
    for shard in module.parameters():
        shard[...] = flat[start : start + shard.size]
        start += shard.size
    module.broadcast_updated_params()
    assert np.array_equal(module.forward(x, training=False), new.forward(x, training=False))


@pytest.mark.parametrize("who", [0, -1])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
def test_nobody_writes_what_a_late_rank_still_reads(shared, strategy, who):
    """One rank is still in an evaluation when the other ranks load new parameters."""
    x, _ = tiny.micro_batch(0, 0, CONFIG)
    module = tiny.make(shared, CONFIG, strategy)
    expected = tiny.make(SerialComm(), CONFIG).forward(x, training=False)
    state = tiny.make(SerialComm(), CONFIG, seed=5).state_dict()
    comm = RecordingComm(shared)
    comm.progress = lambda: late(who % shared.size, shared, 0.03)
    module.comm = module.group = comm
    y = module.forward(x, training=False)
    module.load_state_dict(state)
    assert np.array_equal(y, expected)
    assert tiny.digest(module.state_dict()) == tiny.digest(state)


def shared_pss():
    """Return the proportional share of this process in shared pages, in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"Pss_Shmem:\s+(\d+) kB", text).group(1))


@pytest.mark.world(2, 3, 4, 8)
def test_a_node_holds_parameters_once(shared):
    """All ranks together use the memory of one copy of the parameters plus the gradient slots."""
    config = GPT2.from_flags(
        {"layers": 12, "dim": 192, "heads": 3, "ffn": 768, "context": 8, "vocab_size": 64}
    )
    shared.memory([], [])  # frees memory of earlier tests
    before = sum(shared.allgather_object(shared_pss()))
    module = tiny.make(shared, config, FULL_SHARD)
    for unit in module.units:
        unit.start_gather()
        unit.wait_gather()
        assert np.isfinite(unit.parameters.full.sum())
    shared.barrier()
    growth = sum(shared.allgather_object(shared_pss())) - before
    shared.barrier()
    parameters = sum(unit.unit.length for unit in module.units) * 4
    slots = module.gradient_pool.nbytes * shared.size
    assert parameters > 20e6
    assert 0.98 * (parameters + slots) < growth < 1.02 * (parameters + slots) + 4096 * 8 * shared.size


def test_memory_comes_back_when_modules_are_gone_on_all_ranks(shared):
    gc.collect()
    shared.memory([], [])
    gc.collect()
    modules = [tiny.make(shared, CONFIG) for _ in range(3)]
    shared.memory([], [])
    total = shared.shared_bytes
    shard = modules[0].units[0].parameters.master_shard if shared.rank == shared.size - 1 else None
    before = None if shard is None else shard.copy()
    del modules
    gc.collect()
    shared.memory([], [])
    less = shared.shared_bytes
    assert less < total / 2, "the last rank keeps one window of three"
    assert shard is None or np.array_equal(shard, before)
    del shard
    shared.memory([], [])
    assert shared.shared_bytes < less


@strategies
def test_what_is_set_aside_for_a_run_is_what_its_module_takes(strategy):
    config = Config(
        strategy=strategy.name, bucket_mb=0.02, freeze=["blk.0.*"], prefetch=2, transport="shared"
    )
    world, notes = World(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), MPI), []
    choice = choose_transport(world, config, CONFIG, notes)
    comm = choice.comm
    assert notes == []
    assert choice.text == (f"shared, {comm.shared_bytes / 2**20:.1f} MiB of the node's shared memory")
    before = comm.shared_bytes
    module = ShardedModule(CONFIG.stages(), comm, **vars(layout_config(config, CONFIG)))
    assert comm.shared_bytes == before
    module.initialize(0)
    accumulator = tiny.GradAccum(module, 2 * comm.size + 1)
    tiny.run_step(module, accumulator, CONFIG, 0, 2 * comm.size + 1)
    ShardedAdamW(module).step()
    module.state_dict()
    comm.close()
    assert tiny.digest({"": np.concatenate(module.parameters())}), "arrays outlive the communicator"


def test_a_buffer_of_nobodys_is_reduced_by_messages(shared):
    partition = Partition(1000, shared.size, 10)
    out = np.empty(partition.counts[shared.rank], np.float32)
    shared.reduce_scatter(np.full(1000, shared.rank + 1, np.float32), out, partition).wait()
    assert np.all(out == sum(range(1, shared.size + 1)))


def test_more_reductions_than_the_table_has_entries(shared):
    partition, count = Partition(64, shared.size), 2 * kinds.ENTRIES + 3
    pool = shared.memory([], [64] * 3).buffers
    slots = [pool.take(64) for _ in range(3)]
    out = np.zeros((count, partition.counts[shared.rank]), np.float32)
    for number in range(count):
        slots[number % 3][:] = number
        shared.reduce_scatter(slots[number % 3], out[number], partition).wait()
    assert np.array_equal(out, np.zeros_like(out) + shared.size * np.arange(count)[:, None])
    handles = [shared.reduce_scatter(slots[0], row, partition) for row in out]
    for handle in reversed(handles):
        handle.wait()
    assert np.all(out == shared.size * slots[0][0])


def test_more_than_there_is_is_refused_on_all_ranks(shared):
    before = shared.shared_bytes
    with pytest.raises(NoSharedMemory, match=r"MiB of shared memory .*/dev/shm has .* MiB free"):
        shared.memory([Partition(1 << 48, shared.size)], [])
    with pytest.raises(NoSharedMemory, match="MiB of shared memory"):
        SharedComm(full=[Partition(1 << 48, shared.size)])
    assert shared.shared_bytes <= before
    assert shared.allgather_object(shared.rank) == list(range(shared.size))
    assert tiny.train(shared, CONFIG) == tiny.train(SerialComm(), CONFIG)


class TwoNodes:
    """World whose odd ranks seem to be on another node."""

    def __getattr__(self, name):
        return getattr(MPI.COMM_WORLD, name)

    def Split_type(self, kind, key):
        return MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() % 2, key)


@pytest.mark.world(2, 3, 4, 8)
def test_ranks_of_two_nodes_share_nothing(monkeypatch):
    with pytest.raises(NodesApart, match="the ranks are on 2 nodes"):
        SharedComm(TwoNodes())
    odd = {2: "each node has one rank", 3: "unequal numbers"}.get(SIZE, "not consecutive")
    with pytest.raises(NodesApart, match=odd):
        NodesComm(TwoNodes())
    monkeypatch.setenv(PRETEND, "1")
    world, notes = World(MPI.COMM_WORLD.Get_rank(), SIZE, MPI), []
    choice = choose_transport(world, Config(transport="auto"), CONFIG, notes)
    assert (choice.text, notes) == ("mpi, because each node has one rank", [])
    assert choice.comm.kind == kinds.MPI
    choice.comm.close()
    with pytest.raises(UsageError, match=r"--transport shared: each node has one rank; use .* auto or mpi"):
        choose_transport(world, Config(transport="shared"), CONFIG, notes)


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_which_transport_auto_takes(transport):
    world, notes = World(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), MPI), []
    choice = choose_transport(world, Config(transport=transport, reduction="fast"), CONFIG, notes)
    comm = choice.comm
    takes_shared = transport == "auto" and comm.size > 1
    assert isinstance(comm, SharedComm) == takes_shared
    assert isinstance(comm, SerialComm) == (transport == "auto" and comm.size == 1)
    assert comm.exact == (transport == "auto"), "fast sums are exact over shared memory and on one rank"
    assert notes == []
    assert choice.text.partition(",")[0] == ("" if comm.size == 1 else comm.kind.name)
    assert choice.text.endswith(" exact") == takes_shared
    fallback = kinds.SERIAL if transport == "auto" else kinds.MPI
    assert comm.kind == (kinds.SHARED if takes_shared else fallback)
    comm.close()
