"""What a run will take before it is started: memory of a rank, bytes that travel, time of a step.

A plan is a simulated step. `case` is the question. `fake_ops` has arrays with shapes and no memory, on which
`simulate` runs the real module over a transport that only notes what is started and waited for. So
activations, buffers and the order of transfers are seen and not modelled. What operations take beside their
results is in `workspaces`.

`rank_memory` reads what was seen, and adds what a node takes for interpreters and libraries. `traffic` works
from the layout, with a class for each way that slices take. `step_time` plays the list of a step, which does
not depend on the number of ranks, against a clock. `plan` asks about many cases.
"""
