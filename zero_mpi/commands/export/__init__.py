"""`zero-mpi export`: a model in another type or format."""
