"""`zero-mpi generate`: text from a GGUF model, in one process."""
