"""`zero-mpi inspect`: shows and checks a model file or a checkpoint, or compares two of them."""
