"""`zero-mpi supervise`: starts a run, and restarts it on the remaining hosts when it has ended.

`command` is the loop, `hosts` fills in its command and finds the hosts that answer, and `attempt` is one
start. Neither NumPy nor MPI is loaded, and nothing is written into the folder of a run while it lives.
"""
