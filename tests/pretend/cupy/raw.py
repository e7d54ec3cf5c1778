"""Kernels on the CPU: RawModule compiles CUDA C++ with g++ and runs it block by block, thread by thread.

`tests/pretend/emulator/emulator.h` emulates CUDA's language and the threads of a block. This module finds the
kernels of a source, caches libraries by hash in the system's temporary folder, and checks for
undefined behaviour: wrong number or types of arguments, addresses outside the device, blocks that are
too large.

PRETEND_CUPY_SEED (0) selects the order of threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from . import cuda

EMULATOR = Path(__file__).resolve().parents[1] / "emulator"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w", "-DEMULATED=1")
KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\((\d+)[^)]*\))?\s*(\w+)\s*\(')
DYNAMIC = re.compile(r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\s*\[\s*\]\s*;")
STATIC = re.compile(r"__shared__\s+([\w ]+?)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;")
MOST_THREADS, MOST_BLOCKS = 1024, ((1 << 31) - 1, 65535, 65535)
LETTERS = {  # letter of a parameter -> accepted Python type, C type
    "P": ((int,), ctypes.c_uint64),
    "L": ((int, np.int64, np.uint64), ctypes.c_int64),
    "I": ((np.int32,), ctypes.c_int32),
    "U": ((np.uint32,), ctypes.c_uint32),
    "F": ((np.float32,), ctypes.c_float),
    "D": ((float, np.float64), ctypes.c_double),
}
_launches = itertools.count()


class Launch(ctypes.Structure):
    """`emulator::Launch`."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("message", ctypes.c_char * 512),
    ]


def compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        raise RuntimeError("the simulated CuPy needs g++ to run kernels")
    return path


def run_compiler(*arguments: str, text: str) -> str:
    """Return g++'s output for a source; raise RuntimeError with its messages."""
    command = [compiler(), *FLAGS, *arguments, "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ does not compile the kernels:\n{done.stderr[:4000]}")
    return done.stdout


def kernels_of(code: str) -> dict[str, int]:
    seen = run_compiler("-E", "-P", text=code)
    return {name: int(bound or MOST_THREADS) for bound, name in KERNEL.findall(seen)}


def with_shared_memory(code: str) -> str:
    """Return the source with shared variables as statics that are NaN at the start of each block."""
    code = DYNAMIC.sub(r"\1* \2 = (\1*)emulator::now.dynamic.data();", code)
    code = STATIC.sub(r"static \1 \2\3; emulator::begin_shared((void*)&\2, sizeof \2);", code)
    if "__shared__" in re.sub(r"//.*", "", code):
        raise RuntimeError("the simulated CuPy expects one shared variable per declaration")
    return code


def folder() -> Path:
    """Return the cache folder of compiled kernels, one for each user."""
    path = Path(tempfile.gettempdir()) / f"pretend-cupy-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to another user")
    return path


@lru_cache
def library(code: str) -> tuple[Any, dict[str, int]]:
    """Return a source's compiled kernels and its `kernels_of`; one process compiles, the others wait."""
    names = kernels_of(code)
    exported = "".join(f"EMULATE({name})\n" for name in names)
    text = f'#include "{EMULATOR}/emulator.h"\n#line 1 "source"\n{with_shared_memory(code)}\n{exported}'
    header = (EMULATOR / "emulator.h").read_text()
    key = hashlib.sha256("\0".join([text, header, *FLAGS, compiler()]).encode()).hexdigest()[:24]
    path = folder() / f"{key}.so"
    with open(folder() / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            draft = path.with_suffix(f".{os.getpid()}")
            run_compiler("-shared", "-o", str(draft), text=text)
            draft.replace(path)
    return ctypes.CDLL(str(path)), names


class RawModule:
    """`cupy.RawModule` of source code."""

    def __init__(
        self,
        *,
        code: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: Any = None,
    ) -> None:
        if not isinstance(options, tuple):
            raise TypeError("Argument 'options' has incorrect type (expected tuple)")
        if name_expressions is not None or backend != "nvrtc":
            raise NotImplementedError("the simulated CuPy has only kernels with C names, by nvrtc")
        self.code, self.options = code, options

    def get_function(self, name: str) -> RawKernel:
        binary, names = library(self.code)
        if name not in names:
            raise cuda.CUDARuntimeError(f"CUDA_ERROR_NOT_FOUND: named symbol not found ({name})")
        return RawKernel(binary, name, names[name])


class RawKernel:
    """`cupy.RawKernel`: a call queues the kernel on the stream."""

    def __init__(self, binary: Any, name: str, most_threads: int) -> None:
        self.name, self._most_threads = name, most_threads
        describe, self._run = binary[f"kinds_of_{name}"], binary[f"emulate_{name}"]
        describe.restype = ctypes.c_char_p
        self.parameters = describe().decode()

    @property
    def kernel(self) -> RawKernel:
        return self

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        launch = Launch(
            shared=shared_mem, seed=next(_launches) + 1 + int(os.environ.get("PRETEND_CUPY_SEED", "0"))
        )
        launch.grid[:], launch.block[:] = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        self._check_sizes((*grid, 1, 1)[:3], (*block, 1, 1)[:3])
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, got {len(args)}")
        values = [self._argument(*pair) for pair in zip(self.parameters, args, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))

        def run() -> None:
            if self._run(ctypes.byref(launch), pointers):
                raise cuda.CUDARuntimeError(f"{self.name}: {launch.message.decode()}")
            assert values  # keeps the values alive, as `pointers` points to them

        (stream or cuda.get_current_stream()).do(run)

    def _check_sizes(self, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
        if not all(0 < n <= limit for n, limit in zip(grid, MOST_BLOCKS, strict=True)):
            raise ValueError(f"{self.name}: a grid of {grid}")
        if not 0 < int(np.prod(block)) <= self._most_threads:
            raise ValueError(f"{self.name}: a block of {block}, at most {self._most_threads} threads")

    def _argument(self, letter: str, value: Any) -> Any:
        """Return an argument for C. Raise TypeError for a wrong type, ValueError for a wrong address."""
        if letter == "P" and hasattr(value, "__cuda_array_interface__"):
            value = value.data.ptr
        types, c_type = LETTERS[letter]
        if type(value) not in types:
            raise TypeError(f"{self.name}: a parameter {letter} takes {types}, got {type(value)} {value!r}")
        if letter == "P" and value and not cuda.is_device_address(value):
            raise ValueError(f"{self.name}: {value:#x} is not in device memory")
        return c_type(value)
