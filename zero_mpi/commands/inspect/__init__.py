"""`zero-mpi inspect`: shows and checks a model file or checkpoint, or compares two."""
