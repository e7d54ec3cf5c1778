"""Flags of a run (`settings`), their combined meaning, and the files that they name (`inputs`)."""
