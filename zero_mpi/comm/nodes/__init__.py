"""Ranks of several nodes: shared memory within a node, messages between them, sums in the order of ranks."""
