"""Command `supervise`: starts a run, and restarts it on the remaining hosts when it was ended.

`restarts` is the loop: start, wait, decide, pause, ask the hosts, start again. `host_pool` fills the command
that is supervised, and knows the hosts and which of them answer. `attempt` is one start and handles signals,
`decision` reads the folder of the run and interprets its end. The run itself resumes from the newest
checkpoint in its folder, on any number of ranks.

Neither NumPy nor MPI is loaded, and nothing is written into the folder of a run while it lives.
"""
