"""`zero-mpi supervise`: starts a run, and restarts it on the remaining hosts when it has ended.

`command` is the loop of restarts, `hosts` finds the hosts that answer and fills in the launch command, and
`attempt` is one start. NumPy and MPI are not loaded, and nothing is written into the folder of a running run.
"""
