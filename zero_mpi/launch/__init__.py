"""Start and end of a job: ranks of a command, agreements, signals, locks, and a common exit status.

`stopping.start` installs signal handlers before it imports a command. `world` runs the command on all ranks
and ends them together; `connect` ends the ranks of a script. `consistency` compares ranks.

Errors. Rank 0 checks inputs such as files, and all ranks get the result (`World.on_root`, `World.run_on_all`;
`comm.agree` works over any transport). For bad input rank 0 prints one line and all ranks exit with status 2.
Any other error is printed with the number of its rank and aborts the job (`ending`). If all ranks fail
together, the job ends after the first rank's message, because other ranks wait a moment before they print.

Hangs. A `Meter` records the name and time of every wait, and `comm.guarded` numbers the collectives. A thread
watches these records, and ranks without progress compare their states (`watchdog`).

Run folders. Rank 0 locks `OUT/.lock` before the job changes anything in OUT (`folder_lock`).
"""
