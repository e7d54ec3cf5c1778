"""Every CUDA kernel compiles for the GPUs of today, without one, and takes what the launch table says."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = [*(pytest.param(name, marks=pytest.mark.long) for name in ("sm_80", "sm_90")), "sm_100"]
PTX_TYPES = {"P": ("u64", "b64"), "L": ("u64", "b64", "s64"), "F": ("f32", "b32"), "D": ("f64", "b64")}
CUPY_ADDS = "-ftz=true"  # to whatever it compiles
ONE_AT_A_TIME = ("add_losses", "add_partials", "attention_", "by_", "counts_", "digit_", "token_keys")
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
    """The launch table, the sources and the options, from a process whose CuPy is the pretend one."""
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
        found = [file for file in files if re.fullmatch(r"libnvrtc\.so\.\d+", file.name)]
        if found:
            return ctypes.CDLL(str(found[0].locate()))
    pytest.skip("nvidia-cuda-nvrtc is not installed: kernels are not compiled")


class Program:
    def __init__(self, text: str, name: str) -> None:
        self.handle = ctypes.c_void_p()
        given = (text.encode(), name.encode(), 0, None, None)
        self.call("CreateProgram", ctypes.byref(self.handle), *given, owned=False)

    def call(self, name: str, *arguments: object, owned: bool = True) -> int:
        """nvrtcNAME of the program; what went wrong is an error, but for compiling."""
        status = nvrtc()[f"nvrtc{name}"](*([self.handle] if owned else []), *arguments)
        assert status == 0 or name == "CompileProgram", f"nvrtc{name}: status {status}"
        return int(status)

    def compile(self, *options: str) -> str:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.call("CompileProgram", len(options), given)
        log = self.read("ProgramLog").decode()
        assert status == 0, log
        return log

    def read(self, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size", ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", buffer)
        return buffer.raw.rstrip(b"\0")

    def close(self) -> None:
        self.call("DestroyProgram", ctypes.byref(self.handle), owned=False)


def test_the_table_names_every_source():
    assert {source for source, _ in told()[0].values()} == set(sources())


def kernels_of(source: str) -> set[str]:
    return {name for name, (where, _) in told()[0].items() if where == source}


@pytest.mark.timeout_seconds(300)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_and_keep_their_registers(architecture):
    nvrtc()
    for source in sources():
        program = Program(told()[1][source], source)
        log = program.compile(
            *told()[2], CUPY_ADDS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"
        )
        assert program.read("CUBIN")[1:4] == b"ELF"
        program.close()
        assert "warning" not in log, log
        noted = re.findall(r"properties for (\w+)\n\D*(\d+) bytes stack frame, (\d+) bytes spill", log)
        assert {name for name, _, _ in noted} >= kernels_of(source), (
            "the assembler says nothing of some kernels"
        )
        assert not [name for name, stack, spilled in noted if int(stack) or int(spilled)], "spilled registers"


def test_kernels_take_what_the_table_says():
    nvrtc()
    for source in sources():
        program = Program(told()[1][source], source)
        program.compile(*told()[2], "--gpu-architecture=compute_80")
        ptx = program.read("PTX").decode()
        program.close()
        entries = dict(re.findall(r"\.entry (\w+)\s*\(([^)]*)\)", ptx))
        assert set(entries) == kernels_of(source)
        bodies = {part.split("(")[0].strip(): part for part in ptx.split(".entry ")[1:]}
        narrow = {name for name, body in bodies.items() if not re.search(r"ld\.global(\.\w+)*\.v4", body)}
        assert not {name for name in narrow if not name.startswith(ONE_AT_A_TIME)}, "no loads of 16 bytes"
        for name, parameters in entries.items():
            found = re.findall(r"\.param \.(?:align \d+ \.)?(\w+)", parameters)
            wanted = told()[0][name][1]
            assert len(found) == len(wanted), name
            assert all(kind in PTX_TYPES[letter] for kind, letter in zip(found, wanted, strict=True)), (
                name,
                found,
            )


def test_flat_buffers_keep_numbers_below_the_smallest_normal_one():
    """AdamW has the bits of the host's, which flushes nothing."""
    program = Program(told()[1]["flat.cu"], "flat.cu")
    program.compile(*told()[2], CUPY_ADDS, "--gpu-architecture=compute_90")
    bodies = {part.split("(")[0].strip(): part for part in program.read("PTX").decode().split(".entry ")[1:]}
    program.close()
    assert set(bodies) == kernels_of("flat.cu")
    for name, body in bodies.items():
        flushing = set(re.findall(r"\b\w+(?:\.\w+)*\.ftz(?:\.\w+)*", body))
        assert flushing <= {"cvt.rn.ftz.f32.f64"}, name  # of 1 - lr times decay, which is near 1
        if name.startswith("adamw_"):
            assert all(f"{step}.rn.f32" in body for step in ("add", "sub", "mul", "div", "sqrt"))
