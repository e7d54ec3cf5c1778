"""Transports for arrays on a GPU: `comm` works out rounds and adds, a wire carries the pieces.

The wires are `aware` (a CUDA-aware MPI), `staged` (pinned memory of the host) and `nccl`; `choice` takes one
after `detect` and `live` have looked. Streams and events are the affair of `side` alone.
"""
