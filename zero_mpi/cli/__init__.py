"""Parts of the command line that all commands share: the parser, printed text, and units."""
