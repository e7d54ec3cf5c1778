"""Commands `zero-mpi NAME` other than `train`: each is a package with a module `command`, or one module."""
