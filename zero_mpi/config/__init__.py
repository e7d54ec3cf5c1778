"""Settings of a run (`settings`), checks of their values (`bounds`), and files that they name (`inputs`)."""
