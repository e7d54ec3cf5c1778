"""Ranks of one node by shared memory: parameters lie there once, sums are made where gradients lie."""
