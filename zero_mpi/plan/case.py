"""Case to plan: model, ranks, nodes, sharding, batch and loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from zero_mpi.comm import Partition, SerialComm, kinds
from zero_mpi.comm.kinds import Transport
from zero_mpi.config.optimizer import ADAMW, whole_matrices
from zero_mpi.config.settings import Config
from zero_mpi.data.packing import DOCUMENTS
from zero_mpi.errors import UsageError
from zero_mpi.models import ModelConfig
from zero_mpi.nn.layer import stage_params
from zero_mpi.nn.preference import Preference
from zero_mpi.optim.rule import AdamW
from zero_mpi.sharding.gradients import accumulates_locally
from zero_mpi.sharding.layout import BUCKET_MB, Layout, LayoutConfig, lay_out
from zero_mpi.sharding.module import check_reduction
from zero_mpi.sharding.norm import SquaresSum, runs_of
from zero_mpi.sharding.parameters import NONE, STATE
from zero_mpi.sharding.precision import Precision, precision_named
from zero_mpi.sharding.rounds import Rounds
from zero_mpi.sharding.strategy import Strategy, strategy_named
from zero_mpi.sharding.unit import Unit

SAME = (  # settings of `train` that a case has under the same name
    "batch_size", "context", "bucket_mb", "frozen", "recompute", "async_save", "reduce_dtype",
    "offload", "optimizer", "qat", "ema", "preference",
)  # fmt: skip
OF_LAYOUT = (  # fields that affect the layout
    "model", "recompute", "strategy_name", "prefetch", "bucket_mb", "frozen",
    "precision_name", "reduce_dtype", "optimizer",
)  # fmt: skip


class SimulatedComm(SerialComm):
    """Communicator of rank 0 for a plan with any number of ranks; it sends nothing."""

    def __init__(self, case: Case) -> None:
        self.size, self.exact, self.kind = case.ranks, case.exact, case.transport
        self.sums_in_place = self.kind == kinds.SERIAL


@dataclass(frozen=True)
class Case:
    """Run to plan. Sizes are named like flags of `zero_mpi.train`. Ranks fill one node after the other.

    The plan is for rank 0, which owns the longest shard of each unit and has a micro-batch in every round.
    All targets count in the loss. For a preference loss, each window is assumed to hold two equally long
    sequences; if prompts are learned, the first half of each sequence is its prompt.

    transport_wanted    value of --transport, or the actual transport of a run
    packed              windows hold several documents
    base_is_reference   the reference of a preference loss is the model without its adapters
    teacher             the loss uses a teacher's predictions
    """

    model: ModelConfig
    ranks: int = 1
    nodes: int = 1
    strategy_name: str = "full-shard"
    transport_wanted: str | Transport = kinds.AUTO
    exact_wanted: bool = True
    batch_size: int = 16
    micro_batch: int = 2
    context: int = 128
    prefetch: int = 1
    bucket_mb: float = BUCKET_MB
    frozen: tuple[str, ...] = ()
    recompute: bool = False
    async_save: bool = False
    precision_name: str = "fp32"
    reduce_dtype: str | None = None
    device: str = "cpu"
    offload: str = NONE
    optimizer: str = ADAMW
    qat: str | None = None
    ema: float | None = None
    packed: bool = False
    preference: Preference | None = None
    base_is_reference: bool = False
    teacher: bool = False

    @property
    def precision(self) -> Precision:
        return precision_named(self.precision_name, self.reduce_dtype)

    def kept_bytes(self, unit: int) -> int:
        return self.layout.units[unit].kept_bytes(self.precision.compute)

    @property
    def sum_bytes(self) -> int:
        """Bytes per element of gradient sums, optimizer states and updated parameters."""
        return int(self.precision.master.itemsize)

    @property
    def reduce_bytes(self) -> int:
        return int(self.precision.reduce.itemsize)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def offloaded_arrays(self) -> int:
        """Number of arrays per parameter, such as moments, that are in host memory."""
        return 0 if self.offload == NONE else len(AdamW.states) + (self.offload == STATE)

    @property
    def strategy(self) -> Strategy:
        return strategy_named(self.strategy_name)

    @property
    def transport(self) -> Transport:
        """Transport of the run, or the transport that a run would choose."""
        if isinstance(self.transport_wanted, Transport):
            return self.transport_wanted
        return kinds.expected(self.transport_wanted, on_gpu=self.on_gpu, ranks=self.ranks, nodes=self.nodes)

    @property
    def exact(self) -> bool:
        """True if reductions add in rank order, which some transports do even with --reduction fast."""
        return self.exact_wanted or not self.transport.adds or self.hybrid

    @property
    def allreduces(self) -> bool:
        """True if a rank sums its micro-batches and one all-reduce per step adds the ranks' sums."""
        return accumulates_locally(SimulatedComm(self), self.strategy)

    @property
    def per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    @property
    def hybrid(self) -> bool:
        """True if each node has all shards: by the strategy, or with replicated moments on NODES."""
        by_node = self.transport == kinds.NODES and not self.strategy.shards_moments
        return self.nodes > 1 and (self.strategy.within_nodes or by_node)

    @property
    def passes_sums(self) -> bool:
        """True if sums pass from node to node and each node adds its gradients."""
        return self.hybrid or (self.transport == kinds.NODES and self.strategy.shards_moments)

    @property
    def owners(self) -> int:
        """Number of ranks over which each unit is sharded."""
        return self.per_node if self.hybrid else self.ranks

    @property
    def shares_full(self) -> bool:
        """True if all owners of shards use one array with the full parameters."""
        return not self.transport.spans_nodes or (self.hybrid and self.transport == kinds.NODES)

    @property
    def shares_gathers(self) -> bool:
        """True if a node gathers units into buffers that all its ranks share."""
        return self.transport == kinds.NODES and not self.hybrid

    @property
    def rounds(self) -> Rounds:
        """Rounds of a step, with the micro-batches of rank 0."""
        return Rounds(-(-self.batch_size // self.micro_batch), 0, self.ranks)

    @property
    def scoring_passes(self) -> tuple[bool, ...]:
        """One flag per pass that only computes log-probabilities: True if the pass uses the adapters."""
        if self.preference is None or not self.preference.has_reference:
            return ()
        unpaired = self.preference.is_unpaired  # an unpaired loss also scores answers to other prompts
        return (False,) * (1 + unpaired) * self.base_is_reference + (True,) * unpaired

    @property
    def log_probabilities(self) -> int:
        """Number of log-probabilities that ranks send per step; 0 without a preference loss."""
        return 0 if self.preference is None else 2 * self.batch_size * (1 + self.preference.learns_prompts)

    @property
    def tokens(self) -> int:
        return self.batch_size * self.context

    @property
    def layout_config(self) -> LayoutConfig:
        names = ("strategy", "prefetch", "bucket_mb", "frozen", "precision")
        full = whole_matrices(self.optimizer, self.model)
        settings = {name: getattr(self, name) for name in names}
        return LayoutConfig(**settings, stored=self.model.stored, whole=full)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(Case(**{name: getattr(self, name) for name in OF_LAYOUT})).with_owners(self.owners)

    @cached_property
    def partitions(self) -> list[Partition]:
        return [unit.partition(self.owners) for unit in self.layout.units]

    @property
    def slices(self) -> list[tuple[Unit, int]]:
        """Pairs of a unit and the number of its elements that rank 0 owns."""
        return [(unit, part.counts[0]) for unit, part in zip(self.layout.units, self.partitions, strict=True)]

    @property
    def trained_slices(self) -> list[tuple[Unit, int]]:
        return [(unit, count) for unit, count in self.slices if unit.trainable]

    @cached_property
    def squares(self) -> int:
        """Number of sums of squares that ranks send for the norm of the gradient."""
        names = stage_params(self.model.stages(self.recompute))
        return SquaresSum(runs_of(self.layout.units, names, self.owners), rank=0).size

    def updated(self, unit: Unit, count: int) -> int:
        return count if self.strategy.shards_moments else unit.length


@lru_cache(maxsize=64)
def layout_of(case: Case) -> Layout:
    """Return the layout that the runtime would compute, cached because many cases share it."""
    return lay_out(case.model.stages(case.recompute), case.layout_config)


def make_case(config: Config, model: ModelConfig, ranks: int, nodes: int) -> Case:
    """Return the case of a configuration. Raise UsageError if the configuration is impossible."""
    transport, on_gpu = config.transport, config.device == "cuda"
    kinds.check_flag(transport, on_gpu)
    if transport == kinds.SHARED.flag and ranks == nodes > 1:
        raise UsageError(f"--transport {transport}: each node has one rank; use --transport auto or mpi")
    if config.strategy == "hybrid-shard" and on_gpu and nodes > 1:
        raise UsageError("--strategy hybrid-shard: with --device cuda expected one node; use full-shard")
    if config.offload != NONE and not on_gpu:
        raise UsageError(f"--offload {config.offload}: expected --device cuda")
    if config.offload == STATE and config.precision == "fp32":
        raise UsageError(f"--offload {STATE}: expected --precision bf16 or fp16; with fp32 use moments")
    return Case(
        model,
        ranks=ranks,
        nodes=nodes,
        strategy_name=config.strategy,
        transport_wanted=transport,
        exact_wanted=config.reduction == "exact",
        micro_batch=min(config.micro_batch, config.batch_size),
        precision_name=config.precision,
        device="cuda" if on_gpu else "cpu",
        prefetch=config.stages_ahead(on_gpu),
        packed=config.packing == DOCUMENTS or config.preference is not None,
        base_is_reference=config.base_is_reference,
        teacher=config.teacher is not None,
        **{name: getattr(config, name) for name in SAME},
    )


def check_sums(case: Case) -> None:
    """Raise UsageError if reductions are impossible, as `train` does."""
    check_reduction(SimulatedComm(case), case.precision)
