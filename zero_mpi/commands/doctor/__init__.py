"""`mpirun -n N zero-mpi doctor`: checks whether a job would run well on these hosts.

`command.CHECKS` is the list of checks. Each check returns rows (`ranks.Row`): name, value, verdict, remedy.
Facts about single ranks are gathered first, so that all ranks have the same rows and the same exit status.
"""
