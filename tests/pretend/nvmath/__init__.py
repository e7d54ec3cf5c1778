"""Subset of nvmath-python that the package uses, on the simulated device: the bindings of cuBLASLt."""

from . import bindings as bindings
