"""Command `supervise`: starts a run, and restarts it on the remaining hosts when it has ended.

`command` is the loop: start, wait, decide, pause, ask the hosts, start again. `hosts` fills the command that
is supervised, and finds the hosts that answer. `attempt` is one start: it handles signals, reads
the folder of the run and interprets its end. The run itself resumes from the newest checkpoint in its folder,
on any number of ranks.

Neither NumPy nor MPI is loaded, and nothing is written into the folder of a run while it lives.
"""
