"""The MPI library, which is started where this module is first imported, and nowhere else.

Any thread may call it: a transfer is pushed on by whoever has time.
"""

from typing import Any

import mpi4py

mpi4py.rc.thread_level = "multiple"

from mpi4py import MPI as MPI  # noqa: E402  (the setting above is read when MPI is imported, which starts it)


def mpi_type(array: Any) -> Any:
    """Return the MPI type of an array's elements; for low precision a type that is moved and never added."""
    assert array.flags.c_contiguous, "a collective needs a contiguous array"
    if array.dtype.itemsize == 2:
        return MPI.UINT16_T
    return MPI._typedict[array.dtype.char]
