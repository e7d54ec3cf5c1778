"""Telemetry of a running job: log, progress bar, metrics, events, status, trackers, spans."""
