"""Where arrays live: in the host's memory, or in that of the one GPU that a rank uses.

A process computes on one device, chosen once, before the first large array (`current`). What both kinds offer
is the few things that the arrays above are made of: flat memory, memory lent to an array that tells when it
comes back, copies between the two sides, and marks in the order of the device's work. Everything else is
array code that NumPy and CuPy share. `arrays` has what is made of them: pools of buffers.
"""

from zero_mpi.device.cuda import Cuda, CudaStopwatch, Mark, gpus, import_cupy, why_no_gpu
from zero_mpi.device.current import Device, adopt, claim, home_of, in_use, is_cupy, local_rank, namespace, use
from zero_mpi.device.host import HOST, Done, Host, Stopwatch
from zero_mpi.device.types import ALIGNMENT, Array

__all__ = [
    "ALIGNMENT",
    "HOST",
    "Array",
    "Cuda",
    "CudaStopwatch",
    "Device",
    "Done",
    "Host",
    "Mark",
    "Stopwatch",
    "adopt",
    "claim",
    "gpus",
    "home_of",
    "import_cupy",
    "in_use",
    "is_cupy",
    "local_rank",
    "namespace",
    "use",
    "why_no_gpu",
]
