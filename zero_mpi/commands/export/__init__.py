"""`zero-mpi export`: converts a model to another type or format."""
