"""What the package uses of nvmath-python, on the pretend device: the bindings of cuBLASLt."""

from . import bindings as bindings
