"""The MPI type of an array's elements."""

from __future__ import annotations

from typing import Any

from zero_mpi.comm.start_mpi import MPI
from zero_mpi.device.types import Array


def mpi_type(array: Array) -> Any:
    """Return the MPI type of an array's elements; for low precision a type that is moved and never added."""
    assert array.flags.c_contiguous, "a collective needs a contiguous array"
    if array.dtype.itemsize == 2:
        return MPI.UINT16_T
    return MPI._typedict[array.dtype.char]
