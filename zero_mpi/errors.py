"""The one exception that means "the user can mend this".

A command turns it into one line on stderr, from rank 0 only, and exit status 2. It is a
`ValueError`, so that callers of the library need not know the class to catch it.
"""


class UsageError(ValueError):
    """Bad usage or bad input: says what was expected, what came, and what to do."""
