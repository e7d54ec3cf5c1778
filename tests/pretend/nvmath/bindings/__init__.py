"""Bindings of CUDA libraries that the package uses."""

from . import cublasLt as cublasLt
