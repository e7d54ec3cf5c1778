"""Command `plan`: reads the flags of `train` and predicts memory, traffic and time of such a run."""
