"""Command `plan`: reads the flags of `train`, and predicts what such a run will take."""
