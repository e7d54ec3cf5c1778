"""zero_mpi: transformers trained over MPI ranks, sharded, exact to the last bit, into GGUF."""

__version__ = "0.1.0"
