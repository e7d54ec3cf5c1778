"""Devices: arrays live in the host's memory, or in that of the one GPU that a rank uses.

A process computes on one device, chosen once, before the first large array (`current`). A device offers the
few things that both kinds have: flat memory, memory lent to an array that tells when it comes back, copies
between host and device, and marks in the order of the device's work. Everything else is array code that NumPy
and CuPy share. `arrays` makes pools of buffers from that, and `ordered_sum` adds arrays in the order of
ranks.

Where the launcher tells a rank its number on the node, `claim` takes that rank's GPU before MPI starts, since
MPI libraries look for the GPU of the thread that starts them. All computing goes to one stream. A step asks
the GPU for one number only, the norm of the gradient: losses stay there until the step's total is formed. So
the host runs ahead and launches work while the GPU computes.
"""

from zero_mpi.device.cuda import Cuda, CudaMark, CudaStopwatch, gpus, import_cupy, libraries, why_no_gpu
from zero_mpi.device.current import Device, adopt, claim, home_of, in_use, is_cupy, namespace, use
from zero_mpi.device.host import HOST, Done, Host, HostStopwatch
from zero_mpi.device.types import ALIGNMENT, Array

__all__ = [
    "ALIGNMENT",
    "HOST",
    "Array",
    "Cuda",
    "CudaMark",
    "CudaStopwatch",
    "Device",
    "Done",
    "Host",
    "HostStopwatch",
    "adopt",
    "claim",
    "gpus",
    "home_of",
    "import_cupy",
    "in_use",
    "is_cupy",
    "libraries",
    "namespace",
    "use",
    "why_no_gpu",
]
