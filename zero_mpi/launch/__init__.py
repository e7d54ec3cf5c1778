"""A job of ranks from its start to its end: the world, agreement, signals, locks, and one end for all.

`world` starts a command on all ranks and ends them together; `connect` does the same for a script. Signals
are heard from the first line on (`interrupts`, `stopping`), what stands still is found (`watchdog`,
`hang_report`, `lookout`), and ranks that differ are named (`consistency`).
"""
