"""Sharding: units that travel together, the strategies, and the module that runs a model over ranks.

`layout` cuts a model into units, `schedule` makes the lists of actions, and `actions.run` follows them. A
unit at run time has parameters (`parameters`) and gradients (`gradients`), each with one class for every way
to keep them. `module` joins all of it, `passes` takes a micro-batch through the stages, `rounds` deals
micro-batches out to ranks. Scripts use these by `zero_mpi.compat`, which checks arguments.

Units. A unit is the parameters of one scope (`token_embd`, `blk.3`, `output`) in one flat buffer, or under
`no-shard` a bucket of bytes filled in reverse order. Frozen parameters of a scope form a separate unit, which
needs no gradient. A tied head has the embedding's scope, so it is in the same unit. A slice may be empty.

Exactness. docs/exact.md lists what could move bits and what is done about it. In the code: the owner adds
slices in rank order (`device.ordered_sum`), and the squares of the norm are added in one order (`norm`). An
allreduce adds nothing but zeros to what a rank sends. Losses travel in the same way; they are divided by the
tokens of the whole step before backward, so nothing is divided by the number of ranks.
"""
