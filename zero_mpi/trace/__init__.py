"""Time lines of all ranks: the file that Perfetto and chrome://tracing open, and what it tells in a table.

`trace_events` makes a rank's part of the file of what it has recorded (`telemetry.spans`); `timeline` brings
the parts together. `python -m zero_mpi.trace FILE` reads the file back (`read`), works out where each rank's
time went (`breakdown`), and prints it (`tables`).
"""
