"""A job of ranks from its start to its end: the world, agreement, signals, locks, and one end for all.

`stopping.start` takes signals (with `interrupts`) before it imports a command. `world` starts the command on
all ranks and ends them together; `connect` does the same for a script. Ranks that differ are named
(`consistency`).

Errors. What only one rank can see, such as files, rank 0 looks at, and all ranks learn of it
(`World.on_root`, `World.together`; `comm.agree` works over any transport). Bad input is one line from rank 0
and status 2 on all ranks. Any other error is printed with its rank and aborts the job (`ending`). If all
ranks fail at once, later ranks wait a moment and are ended before they repeat the same message.

Hangs. Every wait leaves its name and time in a `Meter`, and each collective a number; one thread watches both
(`watchdog`). A rank that has waited for 5 seconds writes where it is into a file under `OUT/.ranks`
(of a script, under the folder of temporary files) and reads those of others: where ranks have
started different collectives, or one has ended, it prints where all ranks stand and ends the job. Otherwise
one rank does so at `--timeout`, with status 86. A rank that has written nothing is stopped or lost. A second
thread uses no files, in case the file system hangs.

One job in a folder. Rank 0 makes `OUT/.lock` before the job touches anything there, locks it with flock, and
renews its record (`folder_lock`). flock is used and not fcntl's locks, because those are lost
when any handle of the file is closed, and a file must be opened again to see over NFS what others wrote.
"""
