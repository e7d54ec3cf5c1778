"""Flags of a run (`settings`), checks of these flags (`bounds`), and the files that they name (`inputs`)."""
