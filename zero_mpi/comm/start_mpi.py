"""The MPI library, which is started where this module is first imported, and nowhere else.

Any thread may call it: a transfer is pushed on by whoever has time.
"""

import mpi4py

mpi4py.rc.thread_level = "multiple"

from mpi4py import MPI as MPI  # noqa: E402  (the setting above is read when MPI is imported, which starts it)
