"""Sharding: units of parameters, strategies, and the module that runs a model on all ranks.

`layout` cuts a model into units, `schedule` makes lists of actions, and `actions.run` executes them. A unit
has parameters (`parameters`) and gradients (`gradients`), with one class for each way to store them. `module`
combines everything, `passes` runs a micro-batch through the stages, and `rounds` assigns micro-batches to
ranks. Scripts use these classes through `zero_mpi.compat`, which checks arguments.

Units. A unit holds the parameters of one scope (`token_embd`, `blk.3`, `output`) in one flat buffer. Under
`no-shard` a unit is a bucket of limited size, filled in reverse order. Frozen parameters of a scope form
another unit without gradients. A tied head has the embedding's scope, so it is in the same unit.

Exactness. docs/exact.md lists what could change results, and what prevents it. The owner of a slice adds
the ranks' gradients in rank order (`device.ordered_sum`), and the norm adds squares in one order (`norm`). In
an allreduce, for example of losses, one rank sends each value and all others send 0. Losses are divided by
the tokens of the full step before backward, so no result is divided by the number of ranks.
"""
