"""Offloaded moments are bit-identical to moments on the GPU; steps allocate nothing and wait for events."""

import gc
import sys
import time
from functools import partial

import numpy as np
import pytest
import tiny
from checkpoints import load_checkpoint, save_checkpoint

from zero_mpi import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, SerialComm, ShardedModule, device, ops
from zero_mpi.checkpoint.state import Contribution, Description, Snapshot, TrainingProgress
from zero_mpi.compat.module import ALL
from zero_mpi.compat.optimizer import ShardedOptimizer
from zero_mpi.errors import UsageError
from zero_mpi.models import GPT2
from zero_mpi.nn import Linear, Stage
from zero_mpi.nn.layer import Param
from zero_mpi.optim import offload
from zero_mpi.optim.offload import Offload
from zero_mpi.optim.rule import AdamW, Rule
from zero_mpi.sharding.precision import BF16, FP16, FP32
from zero_mpi.sharding.unit import Unit

CONFIG = tiny.MODELS["gpt2 tied"]
ROWS = {"layers": 1, "dim": 48, "heads": 2, "context": 8, "vocab_size": 300}
DESCRIPTION = Description("gpt2", CONFIG.metadata(), {"seed": 0}, {"threads": 1})


FIRST, SECOND = AdamW.states
ADAMW = AdamW()


class Descent(Rule):
    type, states = "descent", ("initial",)

    def begin(self, part):
        part.parameters[...] *= np.float32(0.5)
        part.states["initial"][...] = part.parameters

    def update(self, part, lr, grad_scale, step):
        part.parameters[...] -= part.gradients * np.float32(lr)


def is_pretend():
    return hasattr(sys.modules["cupy"].cuda.Stream, "do")


@pytest.fixture
def pieces(monkeypatch):
    monkeypatch.setattr(offload, "CHUNK_ELEMENTS", 2048)
    monkeypatch.setenv("PRETEND_CUPY_DELAY", "0.0005")


def optimizers(config=CONFIG, strategy=FULL_SHARD, how="moments", rule=ADAMW, **options):
    pair = []
    for place in ("none", how):
        masters = place == "state"
        module = ShardedModule(config.stages(), SerialComm(), strategy, offload_masters=masters, **options)
        module.initialize(seed=3)
        pair.append(ShardedOptimizer(module, rule, lr=1e-2, weight_decay=0.3, offload=place))
    return pair


def step(optimizer, number):
    generator = np.random.default_rng(number)
    for unit in optimizer.units:
        _, gradient, part = unit.updated
        gradient.fill(0)
        for segment in unit.unit.segments(part):  # gaps stay zeros
            size = segment.where.stop - segment.where.start
            device.in_use().copy(gradient[segment.where], generator.standard_normal(size, np.float32))
    optimizer.module.rounds_open = ALL
    return optimizer.step(max_norm=1.0)


def on_host(array):
    return device.in_use().to_host(array).copy()


def bits(optimizer):
    arrays = {}
    for unit in optimizer.module.units:
        arrays[f"parameters {unit.name}"] = on_host(unit.parameters.master_shard)
        arrays[f"read {unit.name}"] = on_host(unit.parameters.shard)
    for unit, states in optimizer.states.items():
        arrays |= {f"{name} {unit}": on_host(values) for name, values in states.items()}
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("how", "precision"), [("moments", FP32), ("moments", BF16), ("state", BF16), ("state", FP16)]
)
@pytest.mark.parametrize(
    "strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], ids=lambda strategy: strategy.name
)
def test_the_same_bits_as_on_the_gpu(gpu, pieces, strategy, how, precision):
    plain, offloaded = optimizers(strategy=strategy, how=how, precision=precision)
    assert max(unit.updated[0].size for unit in offloaded.units) > 4 * 2048
    for number in range(3):
        assert step(plain, number) == step(offloaded, number)
    assert bits(plain) == bits(offloaded)
    assert any(any(states[SECOND] > 0) for states in offloaded.states.values())


@pytest.mark.parametrize("how", ["moments", "state"])
def test_a_rule_of_ones_own_begins_and_updates_like_on_the_gpu(gpu, pieces, how):
    pair = optimizers(how=how, precision=BF16, rule=Descent())
    for action in (ShardedOptimizer.begin, partial(step, number=0)):
        for optimizer in pair:
            action(optimizer)
        assert bits(pair[0]) == bits(pair[1])
    for unit in pair[1].module.units:
        masters = on_host(unit.parameters.master_shard)
        np.testing.assert_array_equal(on_host(unit.parameters.shard), masters.astype(BF16.compute))


def test_slices_that_are_rows(gpu, pieces):
    """If a row is longer than the chunk size, a chunk is one row."""
    plain, offloaded = optimizers(GPT2.from_flags(ROWS), by_rows=True)
    for number in range(2):
        step(plain, number), step(offloaded, number)
    assert bits(plain) == bits(offloaded)


def test_a_step_that_is_left_out_changes_nothing(gpu, pieces):
    plain, offloaded = optimizers()
    step(offloaded, 0)
    before = bits(offloaded)
    offloaded.units[0].updated[1].fill(np.inf)
    offloaded.module.rounds_open = ALL
    assert offloaded.step().skipped
    assert bits(offloaded) == before
    step(plain, 0)
    assert bits(plain) == before


def test_moments_are_of_the_host_and_rooms_are_allocated_once(gpu, pieces):
    gc.collect()  # frees garbage of earlier tests before the measurement
    _, optimizer = optimizers()
    pool = sys.modules["cupy"].get_default_memory_pool()
    held = []
    for number in range(4):
        step(optimizer, number)
        held.append((pool.used_bytes(), pool.total_bytes()))
    assert held[1:] == held[1:2] * 3
    elements = sum(unit.updated[0].size for unit in optimizer.units)
    assert optimizer.memory_bytes() == 8 * elements
    assert tiny.offloaded_bytes(optimizer) == (8 * elements, offload.BUFFER_SETS * 8 * 2048)
    for held in optimizer.states.values():
        assert isinstance(held[FIRST], np.ndarray)
        assert held[FIRST].flags.c_contiguous


def test_parameters_are_of_the_host_as_well(gpu, pieces):
    _, optimizer = optimizers(how="state", precision=BF16)
    step(optimizer, 0)
    elements = sum(unit.updated[0].size for unit in optimizer.units)
    assert tiny.offloaded_bytes(optimizer) == (8 * elements, offload.BUFFER_SETS * 12 * 2048)
    for unit in optimizer.module.units:
        assert isinstance(unit.parameters.master_shard, np.ndarray)
        np.testing.assert_array_equal(
            on_host(unit.parameters.shard), unit.parameters.master_shard.astype(unit.parameters.shard.dtype)
        )
    state = optimizer.module.state_dict()
    assert {type(array) for array in state.values()} == {np.ndarray}


@pytest.mark.parametrize(("how", "precision"), [("moments", FP32), ("state", BF16)])
def test_checkpoints_are_the_same_files(gpu, pieces, tmp_path, how, precision):
    plain, offloaded = optimizers(how=how, precision=precision)
    progress = TrainingProgress(2, 100, 0, 2)
    folders = []
    for optimizer in (plain, offloaded):
        step(optimizer, 0), step(optimizer, 1)
        folder = tmp_path / f"run{len(folders)}"
        folders.append(save_checkpoint(folder, optimizer, progress, DESCRIPTION))
    for name in ("model.gguf", "optimizer.gguf"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    others = optimizers(how=how, precision=precision)
    for optimizer, folder in zip(others, reversed(folders), strict=True):
        load_checkpoint(folder, optimizer)
        step(optimizer, 2)
    step(plain, 2)
    assert bits(others[0]) == bits(others[1]) == bits(plain)


def test_a_host_without_pinned_memory_is_one_line(gpu, monkeypatch):
    cuda = sys.modules["cupy"].cuda

    def refuse(size, flags=0):
        raise cuda.runtime.CUDARuntimeError(2)  # cudaErrorMemoryAllocation

    monkeypatch.setattr(cuda, "PinnedMemory", refuse)
    module = ShardedModule([Stage("head", Linear("head", 512, 512))], SerialComm())
    with pytest.raises(UsageError, match=r"^the host .* GiB of pinned memory \(.*--offload"):
        ShardedOptimizer(module, ADAMW, offload="moments")


# event -> stream whose delay reveals a missing wait for the event
HELD = {"filled": "_up", "updated": "stream", "emptied": "_down", "stored": "_down"}


def without_wait(way, moments, name, monkeypatch):
    """Let all streams of an offload ignore one kind of event."""
    deaf = {id(moments.stored)} if name == "stored" else {id(getattr(buffer, name)) for buffer in way.buffers}
    for stream in (way._up, way._down, way.where.stream):

        def wait(event, ask=stream.wait_event):
            if id(event) not in deaf:
                ask(event)

        monkeypatch.setattr(stream, "wait_event", wait)


def add_one(gpu, arrays):
    """Queue first += 1 and second += 2 on the computing stream."""

    def add():
        for summand, array in enumerate(arrays, 1):
            array._host += summand

    gpu.stream.do(add)


@pytest.mark.parametrize(
    ("missing", "count"), [(None, 1), (None, 5), ("filled", 5), ("updated", 5), ("emptied", 5), ("stored", 1)]
)
def test_every_event_is_needed(gpu, pieces, monkeypatch, missing, count):
    """One stream is delayed at its start; if other streams do not wait for its event, values are wrong."""
    if not is_pretend():
        pytest.skip("streams of a real GPU cannot be delayed: only the simulated GPU tests this")
    way = Offload(gpu)
    (moments,) = way.states([(count * 2048, 1024, (FIRST, SECOND))])
    moments[FIRST][...] = np.arange(moments.size)
    late = HELD.get(missing, "_down")
    if missing:
        without_wait(way, moments, missing, monkeypatch)
    for _ in range(2):
        (gpu.stream if late == "stream" else getattr(way, late)).do(lambda: time.sleep(0.05))
        for _, arrays in way.through(moments):
            add_one(gpu, arrays)
    right = np.array_equal(moments[FIRST], np.arange(moments.size) + 2) and (moments[SECOND] == 4).all()
    way._up.synchronize(), gpu.synchronize(), way._down.synchronize()
    assert right == (missing is None)


def test_a_piece_comes_while_another_is_updated_and_a_third_goes(gpu, pieces):
    """While the update of the first chunk is delayed, further chunks are copied to the GPU."""
    if not is_pretend():
        pytest.skip("streams of a real GPU cannot be delayed: only the simulated GPU tests this")
    way = Offload(gpu)
    (moments,) = way.states([(3 * 2048, 1024, (FIRST, SECOND))])
    gpu.stream.do(lambda: time.sleep(0.2))
    for _ in way.through(moments):
        pass
    for buffer in way.buffers:
        buffer.filled.synchronize()
    assert not gpu.stream.done
    assert not way._down.done
    way._down.synchronize()


def test_a_snapshot_is_copied_beside_the_work_and_before_the_next_update(gpu, monkeypatch):
    """The host does not wait, the next update waits for the copies, and buffers are reused."""
    unit, snapshot, copies = Unit("u", {"p": Param((1 << 16,), "zeros")}, 1024, True), Snapshot(), []
    arrays = [gpu.from_host(np.ones(1 << 16, np.float32)) for _ in range(4)]
    rates = {"grad_scale": 1.0, "lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "step": 1}
    monkeypatch.setenv("PRETEND_CUPY_DELAY", "0.01")
    expected = np.ones(1 << 16)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(type(gpu.stream), "synchronize", lambda stream: pytest.fail("the host waits"))
            copies += snapshot.take("model", [Contribution("", unit, unit.partition(1), arrays[0])])
            gpu.before_update()
            ops.adamw(*arrays, **rates, decay=np.zeros(1))
        snapshot.complete.wait()
        copy = copies[-1].values.copy()
        gpu.synchronize()
        assert (copy == expected).all()
        expected = gpu.to_host(arrays[0])
    assert copies[0].values is copies[1].values
