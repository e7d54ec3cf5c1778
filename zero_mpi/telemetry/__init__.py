"""Telemetry of a running job: log, progress bar, metrics, events, status, trackers, spans.

While no timeline is recorded, instrumented code only checks `spans.active`.
"""
