"""Classes for scripts: those of the engine, with checks and the names of the systems before this one.

The engine (`sharding`, `optim`) trusts its callers. Here arguments and the order of calls are checked, so
that a slip in a script ends at once in one line, on all ranks alike. docs/api.md has the table of names.
"""
