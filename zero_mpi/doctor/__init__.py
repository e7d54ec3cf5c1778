"""`mpirun -n N python -m zero_mpi.doctor`: whether a job would run well here, and what to do where not.

It is started like the job, by the same launcher on the same hosts, and looks at what the job would find. A
module for each concern gives rows (`verdicts.Row`): what was looked at, what was found, a verdict, a remedy.
What only one rank can see is gathered first, so that all ranks hold the same rows and end with the same
status.
"""
