"""Types and constants that all devices share."""

from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray, which share the methods that are used here

ALIGNMENT = 64  # bytes: a cache line, and the width of the widest CPU vector registers
