"""Telemetry of a run while it works: log, progress bar, metrics, events, status, trackers, spans.

Lines go through the standard library's logger "zero_mpi", and only a command installs a handler: as a library
the package is silent. Each warning of that logger also becomes an event. A line of `events.jsonl` is one
write; an error there is reported once and never ends a run. Code that can record spans checks
`spans.active`, and does nothing more while no timeline is recorded.
"""
