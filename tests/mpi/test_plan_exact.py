"""The plan's traffic equals that of real modules on each rank, and its memory the largest rank's."""

from dataclasses import replace

import pytest
import tiny
import tiny_blocks
from planned_losses import LOSSES, make_step, objective_of
from recording import RecordingComm

from zero_mpi import GradAccum, SerialComm, ShardedAdamW, ShardedOptimizer
from zero_mpi.checkpoint.state import Snapshot, parameters_of, states_of
from zero_mpi.comm import kinds
from zero_mpi.comm.kinds import EXACT_CHUNK, PAGE, RANK_BYTES
from zero_mpi.comm.nodes.comm import NodesComm
from zero_mpi.comm.nodes.hybrid import MPIComm
from zero_mpi.comm.shared.comm import SharedComm
from zero_mpi.comm.topology import PRETEND
from zero_mpi.config.optimizer import rules_of
from zero_mpi.config.settings import Config
from zero_mpi.models import GPT2, Llama, Qwen3MoE
from zero_mpi.models.lora import FROZEN
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import plan_memory
from zero_mpi.plan.traffic import plan_traffic
from zero_mpi.sharding.parameters import ReplicatedParameters
from zero_mpi.sharding.strategy import strategy_named

STRATEGIES = ("full-shard", "shard-grad-op", "no-shard")
EVERY_STRATEGY = (*STRATEGIES, "hybrid-shard")
PER_NODE = 2  # ranks of a simulated node
MIDDLE = {
    "llama": Llama.from_flags(
        {"layers": 4, "dim": 96, "heads": 4, "kv_heads": 2, "context": 11, "vocab_size": 999, "tied": False}
    ),
    "gpt2": GPT2.from_flags({"layers": 3, "dim": 80, "heads": 4, "context": 11, "vocab_size": 777}),
}
RAGGED = ("one", "less", "more")
LOW = [
    {"precision_name": "bf16"},
    {"precision_name": "fp16"},
    {"precision_name": "fp64"},
    {"precision_name": "bf16", "reduce_dtype": "fp32"},
]


class Recorder(RecordingComm):
    def memory(self, *arguments):
        return self.inner.memory(*arguments)


def micro_batches(kind, ranks):
    return {"one": 1, "less": max(1, ranks - 1), "more": ranks + (ranks + 1) // 2}[kind]


def case_of(comm, config, strategy, count, **options):
    options.setdefault("bucket_mb", 25.0)
    settings = {"ranks": comm.size, "strategy_name": strategy, "transport_wanted": comm.kind}
    settings |= {"exact_wanted": comm.exact, "batch_size": count, "micro_batch": 1}
    return Case(config, context=config.context_length, **settings, **options)


def after_step(comm, case):
    options = {"bucket_mb": case.bucket_mb, "prefetch": case.prefetch, "frozen": case.frozen}
    options |= {"precision": case.precision, "whole": case.layout_config.whole}
    strategy = strategy_named(case.strategy_name)
    if case.model.stored:
        module = tiny_blocks.make(comm, case.model, tiny_blocks.bytes_of(case.model), strategy, **options)
    else:
        module = tiny.make(comm, case.model, strategy, recompute=case.recompute, **options)
    optimizer = ShardedOptimizer(module, rules_of(Config(optimizer=case.optimizer), case.model))
    count = case.rounds.micro_batches
    accumulator = GradAccum(module, count)
    tiny.run_step(module, accumulator, case.model, 0, count)
    accumulator.total_loss()
    optimizer.step(max_norm=1.0)
    return module, optimizer


def check_traffic(comm, case):
    recording = Recorder(comm)
    before = comm.meter.sent_bytes
    pair = after_step(recording, case)
    planned = plan_traffic(case, flags=0).sent.tolist()
    assert comm.allgather_object(comm.meter.sent_bytes - before) == planned
    del pair
    if comm.exact and case.nodes == 1 and comm.kind == kinds.MPI:
        assert comm.allgather_object(sum(event.sent for event in recording.log)) == planned


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", tiny.MODELS)
def test_traffic_of_every_model(mpi, name, strategy):
    check_traffic(mpi, case_of(mpi, tiny.MODELS[name], strategy, mpi.size + 1, bucket_mb=0.03))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", tiny.ADAPTED)
def test_traffic_of_adapters(mpi, name, strategy):
    options = {"bucket_mb": 0.03, "frozen": FROZEN}
    check_traffic(mpi, case_of(mpi, tiny.ADAPTED[name], strategy, mpi.size + 1, **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_traffic_of_whole_matrices(mpi, name, strategy):
    options = {"bucket_mb": 0.03, "optimizer": "muon"}
    check_traffic(mpi, case_of(mpi, tiny.MODELS[name], strategy, mpi.size + 1, **options))


@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_of_ragged_rounds(mpi, strategy, kind):
    case = case_of(mpi, tiny.MODELS["llama"], strategy, micro_batches(kind, mpi.size), bucket_mb=0.03)
    check_traffic(mpi, case)


@pytest.mark.parametrize(
    "options",
    [{"prefetch": 0}, {"prefetch": 3}, {"recompute": True}, {"frozen": ("token_embd*", "blk.0.*")}, *LOW],
    ids=str,
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_of_other_settings(mpi, strategy, options):
    for config in (tiny.MODELS["llama"], tiny.MODELS["gpt2 tied"]):
        check_traffic(mpi, case_of(mpi, config, strategy, mpi.size + 1, **options))


@pytest.mark.parametrize("strategy", ["full-shard", "shard-grad-op"])
@pytest.mark.parametrize("name", LOSSES)
def test_traffic_of_other_losses(mpi, name, strategy):
    """The reference's forward gathers parameters too, and sends its log-probabilities as one more vector."""
    changes = dict(LOSSES[name])
    model = replace(MIDDLE["llama"], lora=changes.pop("lora", None))
    case = case_of(mpi, model, strategy, mpi.size + 1, **changes)
    module = tiny.make(mpi, model, strategy_named(strategy), frozen=case.frozen)
    optimizer, accumulator = ShardedAdamW(module), GradAccum(module, case.rounds.micro_batches)
    before = mpi.meter.sent_bytes
    make_step(objective_of(case, module), accumulator, optimizer)
    sent = mpi.allgather_object(mpi.meter.sent_bytes - before)
    assert sent == plan_traffic(case, flags=0).sent.tolist()


@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_of_the_library_s_reductions(fast, strategy, kind):
    check_traffic(
        fast, case_of(fast, tiny.MODELS["llama"], strategy, micro_batches(kind, fast.size), bucket_mb=0.03)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_of_shared_memory(shared, strategy):
    check_traffic(shared, case_of(shared, tiny.MODELS["llama"], strategy, shared.size + 1))


@pytest.fixture(scope="module", params=["nodes", "messages"])
def apart(request):
    """Transport over nodes of two ranks each, with shared memory or with messages only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PRETEND, str(PER_NODE))
        comm = NodesComm() if request.param == "nodes" else MPIComm()
        comm.shard_group()
    yield comm
    comm.close()


@pytest.mark.world(4, 8)
@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_traffic_over_nodes(apart, strategy, kind):
    count = micro_batches(kind, apart.size)
    check_traffic(apart, case_of(apart, tiny.MODELS["llama"], strategy, count, nodes=apart.size // PER_NODE))


@pytest.mark.world(4, 8)
@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_memory_over_nodes(apart, strategy):
    nodes = apart.size // PER_NODE
    case = case_of(apart, MIDDLE["llama"], strategy, 2 * apart.size, nodes=nodes, async_save=True)
    check_memory(apart, case)


def held_bytes(module, optimizer):
    """Return the bytes that this rank's module and optimizer hold, by the plan's names."""
    strategy, units = module.strategy, module.units
    stores = [getattr(unit.parameters, "stored", unit.parameters) for unit in units]
    owned = [one.full if isinstance(one, ReplicatedParameters) else one.shard for one in stores]
    gradients = sum(unit.gradient.sum.nbytes for unit in units)
    for unit in units:
        full = unit.gradient.full
        if full is not None and full.flags.writeable:  # not shared, so the slice may be a view of `full`
            gradients += full.nbytes - (
                unit.gradient.sum.nbytes if unit.gradient.sum.base is full.base else 0
            )
    masters = [one.master for one in stores if one.low is not None]
    copies = Snapshot()
    adapters = stores != [unit.parameters for unit in units]  # with a stored base, only adapters are written
    parts = [
        *copies.take("model", parameters_of(optimizer, adapters)),
        *copies.take("state", states_of(optimizer)),
    ]
    return {
        "parameters": sum(array.nbytes for array in owned),
        "gradients": gradients,
        "moments": optimizer.memory_bytes(),
        "gathered": module.parameter_pool.nbytes if strategy.shards_parameters else 0,
        "unpacked": module.unpacked_pool.nbytes,
        "gradient_buffers": module.gradient_pool.nbytes,
        "masters": sum(one.nbytes for one in masters),
        "snapshot": sum(copy.values.nbytes for copy in parts),
    }


def check_memory(comm, case):
    """Check that each figure's largest value over ranks equals the plan; shared memory may add padding."""
    actual = held_bytes(*after_step(comm, case))
    if case.shares_gathers:
        actual["gathered"] //= case.per_node  # all ranks of a node have the same buffers
    largest = {name: max(comm.allgather_object(value)) for name, value in actual.items()}
    plan = plan_memory(case)
    planned = {name: getattr(plan, name) for name in largest}
    assert planned == pytest.approx(largest, rel=0.01)
    if case.transport in (kinds.SERIAL, kinds.MPI):
        assert planned == largest


@pytest.mark.parametrize(("name", "rounds"), [("llama", 1), ("gpt2", 3)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_every_strategy(exact, name, strategy, rounds):
    options = {"bucket_mb": 0.4, "async_save": True}
    check_memory(exact, case_of(exact, MIDDLE[name], strategy, rounds * exact.size, **options))


# Three blocks of 12 experts, three experts in a unit; most of the model's parameters are in experts.
MIXTURE = Qwen3MoE.from_flags(
    {"layers": 3, "dim": 64, "heads": 2, "kv_heads": 1, "context": 11, "vocab_size": 99, "tied": True}
    | {"experts": 12, "experts_used": 3, "expert_ffn": 64}
)


@pytest.mark.parametrize(
    "options", [{}, {"recompute": True}, {"frozen": ("blk.*_exps*",), "prefetch": 2}], ids=str
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_and_traffic_of_experts_in_several_units(mpi, exact, strategy, options):
    case = case_of(exact, MIXTURE, strategy, 2 * exact.size, bucket_mb=0.15, async_save=True, **options)
    check_memory(exact, case)
    if exact.size > 1 and strategy == "full-shard" and "frozen" not in options:
        cut, full = plan_memory(case), plan_memory(replace(case, bucket_mb=25.0))
        assert cut.gathered + cut.node_shared < (full.gathered + full.node_shared) / 2
    check_traffic(mpi, case_of(mpi, MIXTURE, strategy, mpi.size + 1, bucket_mb=0.15, **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_the_library_s_reductions(fast, strategy):
    check_memory(fast, case_of(fast, MIDDLE["llama"], strategy, 2 * fast.size, async_save=True))


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 3}, {"frozen": ("blk.*",)}, *LOW], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_other_settings(mpi, strategy, options):
    case = case_of(mpi, MIDDLE["llama"], strategy, 2 * mpi.size, async_save=True, **options)
    check_memory(mpi, case)


@pytest.mark.world(1)
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_one_process(strategy, rounds):
    comm = SerialComm()
    check_memory(comm, case_of(comm, MIDDLE["gpt2"], strategy, rounds, async_save=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_node_shares_is_what_the_windows_have(strategy):
    comm = SharedComm()
    counters = comm.shared_bytes
    case = case_of(comm, MIDDLE["llama"], strategy, comm.size)
    module, optimizer = after_step(comm, case)
    assert comm.shared_bytes == plan_memory(case).node_shared
    assert counters == RANK_BYTES * comm.size
    del module, optimizer
    comm.close()


@pytest.mark.world(4, 8)
@pytest.mark.parametrize("strategy", ["full-shard", "hybrid-shard"])
def test_what_each_of_several_nodes_shares(monkeypatch, strategy):
    monkeypatch.setenv(PRETEND, str(PER_NODE))
    comm = NodesComm()
    case = case_of(comm, MIDDLE["gpt2"], strategy, comm.size, nodes=comm.size // PER_NODE)
    pair = after_step(comm, case)
    assert comm.shared_bytes == plan_memory(case).node_shared
    del pair
    comm.close()


def test_arriving_slices_have_at_most_the_planned_room():
    """The number of simultaneous reductions varies, so the plan is an upper bound."""
    comm = MPIComm()
    case = case_of(comm, MIDDLE["llama"], "full-shard", comm.size + (comm.size + 1) // 2)
    after_step(comm, case)
    longest = max(partition.counts[0] for partition in case.partitions)
    place = -(-min(longest, EXACT_CHUNK) * 4 // PAGE) * PAGE
    rooms = {count: len(arrays) for (count, _), arrays in comm._scratch.items() if arrays}
    touched = sum(number * (count - 1) * place for count, number in rooms.items())
    planned = plan_memory(case).transport
    assert planned >= touched >= planned / 2 - 1
    comm.close()
