"""The flags of a run (`settings`), what they mean together, and which files they name (`inputs`)."""
