"""`zero-mpi report`: one HTML page of runs. `runs` reads their folders, `command` makes figure and tables."""
