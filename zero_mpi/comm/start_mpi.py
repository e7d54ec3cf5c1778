"""The MPI library. The first import of this module starts it; no other module imports mpi4py.

MPI is started with support for calls from any thread, because any idle thread may advance a transfer.
"""

from typing import Any

import mpi4py

mpi4py.rc.thread_level = "multiple"

from mpi4py import MPI as MPI  # noqa: E402  (the setting above is read when MPI is imported, which starts it)


def mpi_type(array: Any) -> Any:
    """Return the MPI type of an array's elements; low-precision types are only copied and never added."""
    assert array.flags.c_contiguous, "a collective needs a contiguous array"
    if array.dtype.itemsize == 2:
        return MPI.UINT16_T
    return MPI._typedict[array.dtype.char]
