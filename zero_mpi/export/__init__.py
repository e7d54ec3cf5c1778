"""`python -m zero_mpi.export`: a model in another type or format."""
