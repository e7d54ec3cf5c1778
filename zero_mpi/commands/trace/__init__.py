"""Command `trace`: reads the time line of a run, which `train.timeline` writes, and says where time went."""
