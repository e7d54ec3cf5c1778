"""The command line: `zero-mpi COMMAND`, and what all commands share: parser, text, units."""
