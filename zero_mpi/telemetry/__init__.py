"""Telemetry of a run while it works: log, progress bar, metrics, events, status, trackers, spans.

Code that can record spans checks `spans.active`, and does nothing more while no timeline is recorded.
"""
