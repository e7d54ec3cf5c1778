"""`zero-mpi inspect`: what a model file or checkpoint holds, if it is sound, and what differs."""
