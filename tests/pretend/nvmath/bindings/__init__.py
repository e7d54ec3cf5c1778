"""Bindings of CUDA's libraries, as far as the package uses them."""

from . import cublasLt as cublasLt
