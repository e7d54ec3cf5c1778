"""`python -m zero_mpi.supervise [flags] -- mpirun ...`: starts a run, and starts it again where it was ended.

`restarts` is the loop: start, wait, decide, wait a while, look for hosts, start again. `launch_line` reads
the command that is supervised and puts other hosts into it; `host_pool` knows the hosts and asks which of
them answer; `attempt` is one start from its first moment to its last process, and `stop_request` what it is
told meanwhile; `decision` says what an end means; `run_facts` is what the run folder shows of all that. The
run goes on by itself: its command takes the newest checkpoint in its folder, on any number of ranks.

Neither NumPy nor MPI is loaded: whatever goes wrong there must not reach the process that mends it. While a
run lives nothing is written into its folder.
"""
