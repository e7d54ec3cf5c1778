"""The kernel of the transports compiles for the GPUs of today, and with CuPy's options it keeps denormals."""

import re

import pytest
from test_kernel_compile import ARCHITECTURES, Program, nvrtc

from zero_mpi.device import ordered_sum as device_sum

ENTRIES = {*(f"add_{kind}" for kind in device_sum.KINDS), device_sum.PAIRWISE}
MOST = re.compile(r"constexpr int MAX_PARTS = (\d+);")
CUPY_ADDS = "-ftz=true"  # to whatever it compiles: sums would lose numbers that the host keeps


@pytest.fixture
def program():
    nvrtc()
    program = Program(device_sum.SOURCE.read_text(), device_sum.SOURCE.name)
    yield program
    program.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_and_keeps_its_registers(program, architecture):
    options = *device_sum.OPTIONS, CUPY_ADDS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"
    log = program.compile(*options)
    noted = re.findall(r"properties for (\w+)\n\D*(\d+) bytes stack frame, (\d+) bytes spill", log)
    assert {name for name, _, _ in noted} == ENTRIES
    assert all((stack, spilled) == ("0", "0") for _, stack, spilled in noted), log


def test_sums_keep_denormals_and_read_four_at_a_time(program):
    program.compile(*device_sum.OPTIONS, CUPY_ADDS, "--gpu-architecture=compute_90")
    ptx = program.read("PTX").decode()
    assert set(re.findall(r"\.entry (\w+)", ptx)) == ENTRIES
    assert "add.rn.f32" in ptx
    assert not re.search(r"add(\.rn)?\.ftz", ptx)
    assert re.search(r"ld\.global(\.\w+)*\.v4\.f32|ld\.global(\.\w+)*\.v4\.b32", ptx)
    assert MOST.search(device_sum.SOURCE.read_text())[1] == str(device_sum.MAX_PARTS)
