"""CUDA devices of each host, and whether the MPI library takes their memory.

Only a live test tells (`comm.gpu.probe`), in a separate process: some libraries claim support and then crash.
Without it a job still runs, with messages through host memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_mpi.cli.text import plural
from zero_mpi.comm.gpu.probe import PROBE, PROBE_SECONDS, run_probe
from zero_mpi.commands.doctor.ranks import NOTE, Ranks, Row, assessed
from zero_mpi.ops.code_cache import installed

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
DRIVER = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvgpu")  # PCs and servers, WSL, Jetson
STAGED = (
    "messages go through host memory; for more speed use the CUDA-aware MPI of your site, with mpi4py built "
    "on it"
)


@dataclass(frozen=True)
class Devices:
    """Devices of a host. error: why a driver shows none; mpi: the result of the live test."""

    names: tuple[str, ...] = ()
    driver: str = ""
    error: str = ""
    cupy: str = "none"
    mpi: str = ""
    takes_memory: bool = False


def section(where: Ranks) -> list[Row]:
    """Check the devices of all hosts. Collective."""
    return rows(where.of_nodes(look), where.names)


def look(command: Sequence[str] = PROBE, *, present: bool | None = None) -> Devices:
    """Look for devices of this host; without a driver nothing is started."""
    if not (has_driver() if present is None else present):
        return Devices()
    cupy = next((f"{name} {found}" for name in CUPY if (found := installed(name))), "none")
    told, end = run_probe(command, PROBE_SECONDS)
    answers = [*map(json.loads, told), {"error": end}, {"error": end}]  # or else how the process ended
    about, live = answers[:2]
    if about.get("error") or not about.get("names"):
        return Devices(error=about.get("error") or "the driver finds none", cupy=cupy)
    said = live.get("mpi") or live.get("error", "")
    return Devices(tuple(about["names"]), about["driver"], "", cupy, said, bool(live.get("takes_memory")))


def has_driver() -> bool:
    """Tell whether the system has a driver for CUDA devices."""
    return any(Path(path).exists() for path in DRIVER)


def rows(found: list[Devices], names: tuple[str, ...]) -> list[Row]:
    """Return the rows of all hosts; one row where none has a device."""
    if not any(devices.names or devices.error for devices in found):
        return [Row("CUDA", "no CUDA device")]
    pairs = list(zip(found, names, strict=True))
    told = [row for devices, name in pairs for row in of_host(devices, name)]
    counts = [f"{len(devices.names)} on {name}" for devices, name in pairs]
    if len({len(devices.names) for devices in found}) > 1:
        text = f"hosts differ: {', '.join(counts)}"
        told.append(Row("CUDA", text, NOTE, "start the job on identical hosts"))
    return told


def of_host(devices: Devices, name: str) -> list[Row]:
    """Return the rows of one host."""
    if devices.error:
        remedy = "nvidia-smi on that host; reload or update its driver"
        return [Row("CUDA", f"{name}: {devices.error}", NOTE, remedy)]
    kinds = ", ".join(dict.fromkeys(devices.names))
    value = f"{name}: {plural(len(devices.names), 'device')} ({kinds}), driver for CUDA {devices.driver}"
    has_cupy, aware = devices.cupy != "none", devices.takes_memory
    cupy = f"{name}: {devices.cupy if has_cupy else 'not installed'}"
    return [
        Row("CUDA", value),
        assessed("CuPy", cupy, has_cupy, "pip install 'zero-mpi[cuda12]' (or cuda13)"),
        assessed("CUDA-aware MPI", f"{name}: {'' if aware else 'no, '}{devices.mpi}", aware, STAGED),
    ]
