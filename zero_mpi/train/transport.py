"""Chooses the transport of a run by --transport, the device and the nodes of the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from zero_mpi import device
from zero_mpi.comm import Comm, SerialComm, kinds
from zero_mpi.comm.gpu import select
from zero_mpi.config.optimizer import whole_matrices
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.sharding import strategy_named
from zero_mpi.sharding.layout import LayoutConfig, lay_out
from zero_mpi.sharding.precision import precision_named
from zero_mpi.telemetry import log

NOT_SHARED = (
    "without shared memory the ranks of a node exchange messages, which is slower; enlarge /dev/shm "
    "(containers: --shm-size)"
)


@dataclass(frozen=True)
class TransportChoice:
    """Transport that was chosen. why: the reason for the choice; fast: the library may compute sums."""

    comm: Comm
    why: str = ""
    fast: bool = False

    @property
    def text(self) -> str:
        """Name of the transport for messages; empty for one rank that shares nothing."""
        lone = self.comm.size == 1 and self.comm.kind in (kinds.SERIAL, kinds.MPI)
        if lone and not self.why:
            return ""
        exact = ", still exact" if self.comm.exact and self.fast else ""
        return self.comm.about + exact + (f", because {self.why}" if self.why else "")


def check_wish(config: Config) -> None:
    """Raise UsageError for a transport of another device than the one in use."""
    kinds.check_flag(config.transport, device.in_use().name == "cuda")


def choose_transport(world: World, config: Config, model: ModelConfig, notes: list[str]) -> TransportChoice:
    """Return the transport between the ranks; may add a caution to `notes`. Collective; UsageError on all."""
    exact = config.reduction == "exact"
    if device.in_use().name == "cuda":
        comm, why = select.choose(config.transport, world.size, exact)
        return TransportChoice(comm, why, not exact)
    check_wish(config)
    if world.mpi is None or (world.size == 1 and config.transport == kinds.AUTO):
        return TransportChoice(SerialComm())
    from zero_mpi.comm.nodes.hybrid import MPIComm

    if config.transport == kinds.MPI.flag:
        return TransportChoice(MPIComm(exact=exact))
    return make_shared(world, config, model, notes)


def layout_config(config: Config, model: ModelConfig) -> LayoutConfig:
    """Return the settings of the flags by which a model is laid out over ranks."""
    return LayoutConfig(
        strategy_named(config.strategy),
        prefetch=config.stages_ahead(device.in_use().name == "cuda"),
        bucket_mb=config.bucket_mb,
        frozen=config.frozen,
        precision=precision_named(config.precision, config.reduce_dtype),
        stored=model.stored,
        whole=whole_matrices(config.optimizer, model),
    )


def make_shared(world: World, config: Config, model: ModelConfig, notes: list[str]) -> TransportChoice:
    """Return the transport over shared memory, with room for the model, or else messages."""
    from zero_mpi.comm.nodes.comm import Needs, NodesComm
    from zero_mpi.comm.nodes.hybrid import MPIComm
    from zero_mpi.comm.shared.comm import SharedComm
    from zero_mpi.comm.shared.memory import NodesApart, NoSharedMemory

    strategy = strategy_named(config.strategy)
    layout = lay_out(model.stages(config.recompute), layout_config(config, model))

    def on_nodes_of(ranks: int) -> Needs:
        if strategy.within_nodes or not strategy.shards_moments:
            return Needs(wholes=layout.wholes(ranks), buffers=layout.buffers)
        return Needs(buffers=layout.buffers, gathers=layout.gathers)

    exact = config.reduction == "exact"
    try:
        try:
            wholes = layout.wholes(world.size)
            return TransportChoice(SharedComm(wholes=wholes, buffers=layout.buffers), fast=not exact)
        except NodesApart:
            return TransportChoice(NodesComm(needs=on_nodes_of), fast=not exact)
    except NoSharedMemory as error:
        if isinstance(error, NodesApart):
            if config.transport != kinds.AUTO:
                raise UsageError(
                    f"--transport {config.transport}: {error}; use --transport auto or mpi"
                ) from error
        else:
            notes.append(log.Caution(NOT_SHARED))
        return TransportChoice(MPIComm(exact=exact), str(error))
