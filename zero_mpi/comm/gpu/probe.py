"""Test process that passes device memory to MPI: `python -m zero_mpi.comm.gpu.probe`.

Some libraries claim support but crash on device memory, so only a real test is reliable. `run_probe` runs the
test in a child process that is not part of this job.

The child prints a line of JSON with the devices, then a line that says whether a message from device memory
to device memory arrived. A library that cannot read device memory crashes between the two lines. The test
allocates memory through the driver, so it needs no CUDA package, and passes it to mpi4py as CuPy does.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# CUDA_ERROR_DEVICE_UNAVAILABLE
MEANING = {46: ": another process uses the GPU, whose compute mode allows only one process"}
BYTES = 1 << 20  # bytes of the message: too many to travel together with its header
# Variables of a launcher that make a process act as a rank. Users' settings are kept.
JOB = re.compile(
    r"(PMI|HYDRA|HYDI|PALS|SLURM)_|(PMIX|PRTE)_(?!MCA_|PREFIX$)|OMPI_(?!MCA_|ALLOW_)|MV2_COMM_|"
    r"MPI_LOCAL(NRANKS|RANKID)$"
)
PROBE = (sys.executable, "-m", "zero_mpi.comm.gpu.probe")
PROBE_SECONDS = 20.0  # seconds for the child, because the first use of a device takes long


def run_probe(command: Sequence[str], patience: float = PROBE_SECONDS) -> tuple[list[str], str]:
    """Return the lines of JSON that the child printed, and a text that says how it ended."""
    try:
        process = subprocess.run(
            command,
            env=outside_job(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return jsons(error.stdout or b""), f"no answer within {patience:.0f} s"
    except OSError as error:
        return [], f"cannot be started: {error.strerror or error}"
    return jsons(process.stdout), ending(process.returncode, process.stderr)


def jsons(stdout: bytes) -> list[str]:
    """Return the lines that look like JSON objects; libraries may print other lines."""
    lines = stdout.decode(errors="replace").splitlines()
    return [line for line in lines if line.startswith("{") and line.endswith("}")]


def ending(status: int, stderr: bytes) -> str:
    """Return a text that says how a process ended, for messages."""
    if status < 0:
        return f"the test died of {signal.Signals(-status).name}"
    last = stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
    return f"the test ended with status {status}: {last[0][:80]}".rstrip(": ")


def outside_job(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not JOB.match(name)}


class DriverError(RuntimeError):
    """Error: the driver's library cannot be loaded, or one of its calls failed."""


class Driver:
    """CUDA driver functions that the test calls, by their names in the driver's interface."""

    def __init__(self) -> None:
        try:
            self._calls = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"the driver's library cannot be loaded: {error}") from error
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._calls, name)(*arguments)
        if status:
            raise DriverError(f"{name} fails with status {status}{MEANING.get(status, '')}")

    def devices(self) -> list[str]:
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        names = []
        for number in range(count.value):
            text = ctypes.create_string_buffer(128)
            self("cuDeviceGetName", text, len(text), number)
            names.append(text.value.decode(errors="replace"))
        return names

    def version(self) -> str:
        number = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def open(self) -> None:
        """Make the first device this thread's current device."""
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)

    def upload(self, data: Any) -> DeviceArray:
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(data.size))
        self("cuMemcpyHtoD_v2", address, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.size))
        self("cuCtxSynchronize")
        return DeviceArray(address.value, data.size)

    def download(self, array: DeviceArray) -> Any:
        data = np.empty(array.nbytes, np.uint8)
        self("cuCtxSynchronize")
        pointer, address = ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(array.address)
        self("cuMemcpyDtoH_v2", pointer, address, ctypes.c_size_t(array.nbytes))
        return data


@dataclass(frozen=True)
class DeviceArray:
    """Device memory as bytes, with the CUDA array interface."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def exchange(driver: Driver) -> bool:
    """Return whether a message from device memory to device memory of this process arrives unchanged."""
    from zero_mpi.comm.start_mpi import MPI  # starts MPI

    payload = np.random.default_rng(0).integers(256, size=BYTES, dtype=np.uint8)
    source, target = driver.upload(payload), driver.upload(np.zeros_like(payload))
    receive = MPI.COMM_SELF.Irecv([target, MPI.BYTE], 0, 1)
    MPI.Request.Waitall([receive, MPI.COMM_SELF.Isend([source, MPI.BYTE], 0, 1)])
    return bool((driver.download(target) == payload).all())


def say(**facts: Any) -> None:
    """Write a line of JSON for the parent process, without buffering."""
    os.write(1, f"{json.dumps(facts)}\n".encode())


def main() -> None:
    """Look for devices, try MPI on their memory, and print the results."""
    try:
        driver = Driver()
        names = driver.devices()
        say(names=names, driver=driver.version())
        if names:
            driver.open()  # before MPI starts: Open MPI uses the current device of the starting thread
            arrived = exchange(driver)
            text = "a message from device to device memory arrived"
            say(takes_memory=arrived, mpi=text if arrived else "the received bytes differ from those sent")
    except DriverError as error:
        say(error=str(error))
    except Exception as error:  # the library may raise any error, and the error is the result
        say(takes_memory=False, mpi=f"{type(error).__name__}: {error}".splitlines()[0])


if __name__ == "__main__":
    main()
