"""Start and end of a job: the ranks of a command, their agreements, signals, locks, and one exit status.

`stopping.start` installs signal handlers before it imports a command. `world` starts the command on all ranks
and ends them together; `connect` does the same for a script. `consistency` finds ranks that differ.

Errors. Rank 0 checks inputs such as files, and all ranks get the result (`World.on_root`, `World.run_on_all`;
`comm.agree` works over any transport). For bad input rank 0 prints one line and all ranks exit with status 2.
Any other error is printed with the number of its rank and aborts the job (`ending`). If all ranks fail at
once, the job ends after the message of the first rank, because the others wait a moment before they print.

Hangs. A `Meter` records the name and time of every wait and numbers the collectives. A thread watches it, and
ranks without progress compare their states (`watchdog`).

Run folders. Rank 0 locks `OUT/.lock` before the job changes anything in OUT (`folder_lock`).
"""
