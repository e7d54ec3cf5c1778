"""Sharding: units that are sent as a whole, the strategies, and the module that runs a model on all ranks.

`layout` cuts a model into units, `schedule` makes the lists of actions, and `actions.run` executes them. At
run time, a unit has parameters (`parameters`) and gradients (`gradients`), each with one class for every way
to store them. `module` combines all of it, `passes` runs a micro-batch through the stages, `rounds` assigns
micro-batches to ranks. Scripts use these classes through `zero_mpi.compat`, which checks arguments.

Units. A unit is the parameters of one scope (`token_embd`, `blk.3`, `output`) in one flat buffer, or under
`no-shard` a bucket of limited size, filled in reverse order. Frozen parameters of a scope are another unit,
which has no gradient. A tied head has the embedding's scope, so it is in the same unit. A slice can be empty.

Exactness. docs/exact.md lists what could change bits and how this is avoided. In the code: the owner adds
slices in rank order (`device.ordered_sum`), and the squares of the norm are added in one order (`norm`). An
allreduce adds nothing but zeros to the values that a rank sends. Losses are sent in the same way. They are
divided by the tokens of the full step before backward, so nothing is divided by the number of ranks.
"""
