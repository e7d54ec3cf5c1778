"""Classes for scripts: the engine's, with checks and with the names of other systems.

The engine (`sharding`, `optim`) trusts its callers. Here arguments and the order of calls are checked, so
that a mistake in a script ends at once with one line, on all ranks. docs/api.md has the table of names.
"""
