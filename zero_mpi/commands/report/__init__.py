"""`zero-mpi report`: HTML page on runs. `runs` reads their folders; `command` makes the page."""
