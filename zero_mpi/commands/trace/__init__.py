"""Command `trace`: reads the timeline of a run, which `train.timeline` writes, and says where time went."""
