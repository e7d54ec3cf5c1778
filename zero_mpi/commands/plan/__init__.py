"""Command `plan`: the flags of `train` in, what such a run will take out."""
