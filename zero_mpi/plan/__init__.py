"""Planner: predicts memory per rank, traffic and time per step of a run before it starts.

A `case` describes the run. `simulate` executes the real module on arrays without memory (`fake_ops`, with the
scratch of `workspaces`), so activations, buffers and transfers are observed, not modelled. `rank_memory`,
`traffic` and `step_time` compute the prediction from the result; `plan` does this for many cases.
"""
