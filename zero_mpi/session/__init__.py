"""What a run is, from its flags to its steps: made by `train`, read by other commands.

`resolve` looks at all that flags name and answers with a `RunSpec`; `setup` builds transport, module and
optimizer of it, and `steps` makes the steps, which `observers` see end. `resume` finds the checkpoint to go
on from, `same_flags` and `same_bits` refuse ranks that differ, and `identity` is what decides the bits of a
run. What a run says at its start is in `summary`. `mfu` measures the peak of the machine at the start: matrix
products that grow until one takes 2 ms, for 40 ms on all ranks at once.
"""
