"""Classes for scripts: the engine's classes with checks, under the names that other systems use.

The engine (`sharding`, `optim`) trusts its callers. These classes check arguments and the order of calls, so
that a mistake in a script ends all ranks with a message of one line. docs/api.md has the table of names.
"""
