"""Planner: predicts what a run will take before it starts: memory of a rank, traffic, time of a step.

`case` is the question. `simulate` runs the real module on arrays without memory (`fake_ops`, with the
temporaries of `workspaces`), so activations, buffers and transfers are observed, not modelled. `rank_memory`,
`traffic` and `step_time` read the result; `plan` answers for many cases.
"""
