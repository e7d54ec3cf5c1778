"""Flags of a run (`settings`), checks of their combination, and the files that they name (`inputs`)."""
