"""`zero-mpi supervise`: starts a run, and restarts it on the remaining hosts when it has failed.

`command` is the loop of restarts, `hosts` finds the hosts that answer and fills in the launch command, and
`attempt` is one start. None of them loads NumPy or MPI, or writes into the folder of an active run.
"""
