"""`zero-mpi report`: writes an HTML page on runs. `runs` reads their folders; `command` makes the page."""
