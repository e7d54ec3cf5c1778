"""The transport of a run: what --transport, the device and the nodes of the ranks ask for."""

from __future__ import annotations

from zero_mpi import device
from zero_mpi.comm import Comm, SerialComm
from zero_mpi.comm.gpu import select as device_choice
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.models import ModelConfig
from zero_mpi.sharding import strategy_named
from zero_mpi.sharding.layout import lay_out
from zero_mpi.sharding.precision import precision_named
from zero_mpi.telemetry import log
from zero_mpi.train import memory_check

TRANSPORT = "transport: "  # how the note begins that says what carries between ranks
NOT_SHARED = (
    "without shared memory the ranks of a node send each other messages, which is slower; give "
    "/dev/shm more room (containers: --shm-size)"
)


def make_comm(world: World, config: Config, model: ModelConfig, notes: list[str]) -> Comm:
    """The transport between the ranks, before which nothing large is made.

    Collective; raises UsageError on all ranks alike, also where there is no memory for the run.
    """
    if device.in_use().name == "cuda":
        return device_choice.choose(config.transport, world.size, config.reduction == "exact", notes)
    if config.transport in device_choice.ON_GPU:
        raise UsageError(
            f"--transport {config.transport}: it carries a GPU's arrays; use --device cuda or --transport mpi"
        )
    memory_check.check(world, config, model)
    if world.mpi is None or (world.size == 1 and config.transport == "auto"):
        return SerialComm()
    from zero_mpi.comm.mpi import MPIComm

    comm: Comm | None = None
    if config.transport != "mpi":
        comm = make_shared(world, config, model, notes)
    elif world.size > 1:
        notes.append(f"{TRANSPORT}mpi")
    return comm or MPIComm(exact=config.reduction == "exact")


def make_shared(world: World, config: Config, model: ModelConfig, notes: list[str]) -> Comm | None:
    """The transport over shared memory, with room for the model; None where it is not possible."""
    from zero_mpi.comm.nodes.comm import NodesComm, Wish
    from zero_mpi.comm.shared.comm import SharedComm
    from zero_mpi.comm.shared.window import NodesApart, NoSharedMemory

    strategy = strategy_named(config.strategy)
    layout = lay_out(
        model.stages(config.recompute),
        strategy,
        prefetch=config.prefetch,
        bucket_mb=config.bucket_mb,
        frozen=config.freeze,
        precision=precision_named(config.precision, config.reduce_dtype),
    )

    def on_nodes_of(ranks: int) -> Wish:
        if strategy.within_nodes or not strategy.shards_moments:
            return Wish(wholes=layout.wholes(strategy, ranks), buffers=layout.buffers)
        return Wish(buffers=layout.buffers, gathers=layout.gathers)

    comm: SharedComm | NodesComm
    try:
        try:
            comm = SharedComm(wholes=layout.wholes(strategy, world.size), buffers=layout.buffers)
        except NodesApart:
            comm = NodesComm(wish=on_nodes_of)
    except NoSharedMemory as error:
        if config.transport == "shared" and isinstance(error, NodesApart):
            raise UsageError(f"--transport shared: {error}; use --transport auto or mpi") from error
        notes.append(f"{TRANSPORT}mpi, because {error}")
        if not isinstance(error, NodesApart):
            notes.append(log.Caution(NOT_SHARED))
        return None
    exact = ", exact all the same" if config.reduction == "fast" else ""
    notes.append(f"{TRANSPORT}{comm.about}{exact}")
    return comm


def take_transport(notes: list[str]) -> str:
    """What the note on the transport says, which is taken out: the summary has a line for it."""
    said = [note for note in notes if note.startswith(TRANSPORT)]
    notes[:] = [note for note in notes if note not in said]
    return "".join(said).removeprefix(TRANSPORT)
