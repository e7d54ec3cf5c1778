"""Command line: `zero-mpi COMMAND`, and the parts that all commands share: parser, text, units."""
