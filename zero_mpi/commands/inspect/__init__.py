"""`zero-mpi inspect`: the content of a model file or checkpoint, its soundness, and differences."""
