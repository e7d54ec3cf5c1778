"""Commands other than `train`: `zero-mpi NAME`, each a package with `command`, or a file."""
