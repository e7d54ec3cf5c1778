"""Every CUDA kernel compiles without a GPU and has the parameters of the launch table."""

import ctypes
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from zero_mpi.device import ordered_sum

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = [*(pytest.param(name, marks=pytest.mark.long) for name in ("sm_80", "sm_90")), "sm_100"]
PTX_TYPES = {"P": ("u64", "b64"), "L": ("u64", "b64", "s64"), "F": ("f32", "b32"), "D": ("f64", "b64")}
CUPY_ADDS = "-ftz=true"  # option that CuPy adds for all kernels
SUMS = ordered_sum.SOURCE.name
ONE_AT_A_TIME = ("add_losses", "add_partials", "attention_", "by_", "counts_", "digit_", "pairwise_")
ONE_AT_A_TIME += ("token_keys",)
TELL = """
import json
from zero_mpi.ops import gpu
from zero_mpi.ops.gpu import launch
table = {name: [kernel.source, kernel.parameters] for name, kernel in launch.TABLE.items()}
texts = {source: launch.text(source) for source in {source for source, _ in table.values()}}
print(json.dumps([table, texts, launch.OPTIONS]))
"""


@lru_cache
def told() -> tuple[dict[str, list[str]], dict[str, str], list[str]]:
    """Return the launch table, sources and options, from a process with the simulated CuPy."""
    path = os.pathsep.join([str(ROOT / "tests" / "pretend"), str(ROOT)])
    command, env = [sys.executable, "-W", "error", "-c", TELL], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table, texts, options = json.loads(done.stdout.splitlines()[-1])
    return table, texts, options


def sources() -> list[str]:
    return sorted(path.name for path in (ROOT / "zero_mpi" / "ops" / "gpu" / "kernels").glob("*.cu"))


@lru_cache
def nvrtc() -> ctypes.CDLL:
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        matches = [file for file in files if re.fullmatch(r"libnvrtc\.so\.\d+", file.name)]
        if matches:
            return ctypes.CDLL(str(matches[0].locate()))
    pytest.skip("nvidia-cuda-nvrtc is not installed: kernels are not compiled")


class Program:
    def __init__(self, text: str, name: str) -> None:
        self.handle = ctypes.c_void_p()
        arguments = (text.encode(), name.encode(), 0, None, None)
        self.call("CreateProgram", ctypes.byref(self.handle), *arguments, owned=False)

    def call(self, name: str, *arguments: object, owned: bool = True) -> int:
        """Call nvrtcNAME on the program; a failure of any call but CompileProgram is an error."""
        status = nvrtc()[f"nvrtc{name}"](*([self.handle] if owned else []), *arguments)
        assert status == 0 or name == "CompileProgram", f"nvrtc{name}: status {status}"
        return int(status)

    def compile(self, *options: str) -> str:
        strings = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.call("CompileProgram", len(options), strings)
        log = self.read("ProgramLog").decode()
        assert status == 0, log
        return log

    def read(self, part: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"Get{part}Size", ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"Get{part}", buffer)
        return buffer.raw.rstrip(b"\0")

    def close(self) -> None:
        self.call("DestroyProgram", ctypes.byref(self.handle), owned=False)


class Compiled(NamedTuple):
    log: str
    cubin: bytes
    ptx: str

    def bodies(self) -> dict[str, str]:
        """Return the PTX of each kernel."""
        return {part.split("(")[0].strip(): part for part in self.ptx.split(".entry ")[1:]}


def compiled(source: str, architecture: str) -> Compiled:
    text, options = (
        (ordered_sum.SOURCE.read_text(), ordered_sum.OPTIONS)
        if source == SUMS
        else (told()[1][source], told()[2])
    )
    program = Program(text, source)
    try:
        log = program.compile(*options, CUPY_ADDS, f"--gpu-architecture={architecture}", "--ptxas-options=-v")
        return Compiled(log, program.read("CUBIN"), program.read("PTX").decode())
    finally:
        program.close()


@lru_cache
def all_compiled(architecture: str) -> dict[str, Compiled]:
    """Return the compiled kernels of every source; sources are compiled in parallel."""
    nvrtc(), told()
    names = [*sources(), SUMS]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: compiled(name, architecture), names), strict=True))


def kernels_of(source: str) -> set[str]:
    if source == SUMS:
        return {*(f"add_{kind}" for kind in ordered_sum.KINDS), ordered_sum.PAIRWISE}
    return {name for name, (path, _) in told()[0].items() if path == source}


@pytest.mark.timeout_seconds(300)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_and_keep_their_registers(architecture):
    assert {source for source, _ in told()[0].values()} == set(sources())
    for source, build in all_compiled(architecture).items():
        assert build.cubin[1:4] == b"ELF"
        assert "warning" not in build.log, build.log
        notes = re.findall(r"properties for (\w+)\n\D*(\d+) bytes stack frame, (\d+) bytes spill", build.log)
        silent = kernels_of(source) - {name for name, _, _ in notes}
        assert not silent, "the assembler's log lacks these kernels"
        # On an H100, the gradient of a norm is faster if all reads come first, although registers spill.
        spills = {name: max(int(stack), int(spilled)) for name, stack, spilled in notes}
        assert all(size <= (128 if "norm_backward" in name else 0) for name, size in spills.items()), spills


@pytest.mark.timeout_seconds(300)
def test_kernels_take_what_the_table_says():
    for source, build in all_compiled("sm_100").items():
        entries = dict(re.findall(r"\.entry (\w+)\s*\(([^)]*)\)", build.ptx))
        assert set(entries) == kernels_of(source)
        narrow = [
            name for name, body in build.bodies().items() if not re.search(r"ld\.global(\.\w+)*\.v4", body)
        ]
        assert not [name for name in narrow if not name.startswith(ONE_AT_A_TIME)], "no loads of 16 bytes"
        for name, parameters in entries.items() if source != SUMS else ():
            actual = re.findall(r"\.param \.(?:align \d+ \.)?(\w+)", parameters)
            expected = told()[0][name][1]
            assert len(actual) == len(expected), name
            fits = (kind in PTX_TYPES[letter] for kind, letter in zip(actual, expected, strict=True))
            assert all(fits), (name, actual)


@pytest.mark.timeout_seconds(300)
def test_flat_buffers_and_sums_keep_numbers_below_the_smallest_normal_one():
    """AdamW and sums of transports keep denormals, because they must be bit-identical to the host's."""
    for name, body in all_compiled("sm_100")["flat.cu"].bodies().items():
        flushing = set(re.findall(r"\b\w+(?:\.\w+)*\.ftz(?:\.\w+)*", body))
        assert flushing <= {"cvt.rn.ftz.f32.f64"}, name  # used only for 1 - lr * decay, which is near 1
        if name.startswith("adamw_"):
            assert all(f"{step}.rn.f32" in body for step in ("add", "sub", "mul", "div", "sqrt"))
    sums = all_compiled("sm_100")[SUMS].ptx
    assert "add.rn.f32" in sums
    assert not re.search(r"add(\.rn)?\.ftz", sums)
    limit = re.search(r"constexpr int MAX_PARTS = (\d+);", ordered_sum.SOURCE.read_text())
    assert limit[1] == str(ordered_sum.MAX_PARTS)
