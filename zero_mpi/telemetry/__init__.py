"""What a run tells while it works: log, progress bar, metrics, events, status, TensorBoard, spans of time."""
