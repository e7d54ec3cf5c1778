"""`mpirun -n N zero-mpi doctor`: checks whether a job would run well on these hosts.

`command.CHECKS` is the list of checks. Each returns rows (`ranks.Row`): name, value, verdict, remedy.
Facts that only one rank can see are gathered first, so that all ranks have the same rows and the same status.
"""
