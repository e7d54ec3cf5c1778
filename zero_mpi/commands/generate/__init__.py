"""`zero-mpi generate`: generates text with a GGUF model, in one process."""
