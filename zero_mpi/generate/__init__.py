"""`python -m zero_mpi.generate`: text from a GGUF model, in one process."""
