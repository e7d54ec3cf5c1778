"""A job of ranks from its start to its end: the world, agreement, signals, locks, and one end for all.

`stopping.start` installs signal handlers before it imports a command. `world` starts the command on all ranks
and ends them together; `connect` does the same for a script. `consistency` names ranks that differ.

Errors. Rank 0 checks files and the like, and all ranks get the result (`World.on_root`, `World.run_on_all`;
`comm.agree` works over any transport). Bad input is one line from rank 0 and status 2 on all ranks. Any other
error is printed with its rank and aborts the job (`ending`). If all ranks fail at once, later ranks wait a
moment and are ended before they repeat the same message.

Hangs. Every wait records its name and time in a `Meter`, each collective a number; one thread watches both,
and ranks without progress compare their states (`watchdog`).

One job in a folder. Rank 0 locks `OUT/.lock` before the job touches anything there (`folder_lock`).
"""
