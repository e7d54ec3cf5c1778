"""Planner: predicts what a run will take before it starts: memory of a rank, traffic, time of a step.

A plan is a simulated step. `case` is the question. `fake_ops` has arrays with shapes but without memory, on
which `simulate` runs the real module over a transport that only notes what is started and waited for. So
activations, buffers and the order of transfers are observed, not modelled. `workspaces` counts the temporary
memory of operations.

`rank_memory` reads the result, and adds what a node takes for interpreters and libraries. `traffic` works
from the layout, with a class for each route that slices take. `step_time` plays a step's events, which do
not depend on the number of ranks, against a clock. `plan` answers for many cases.
"""
