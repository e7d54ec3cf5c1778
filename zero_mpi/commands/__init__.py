"""Commands `zero-mpi NAME` except `train`: each is a package with a module `command`, or a single module."""
