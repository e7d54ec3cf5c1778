"""Classes for scripts: the engine's classes with checks, and with the names that other systems use.

The engine (`sharding`, `optim`) trusts its callers. These classes check arguments and the order of calls, so
that a mistake in a script ends at once with one line, on all ranks. docs/api.md has the table of names.
"""
