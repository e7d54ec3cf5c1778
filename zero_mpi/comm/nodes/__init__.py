"""Ranks of several nodes: shared memory within a node, messages between them, sums in rank order.

With N nodes of L ranks each, rank l of every node forms lane l (`comm.topology`). Lanes carry what goes
between nodes, so a link carries each element once instead of L times.

Sums (`sums`). The order is that of ranks, so nodes cannot add by themselves first. But
the running sum can travel: on node n the rank of the lane adds what its node's ranks give to the sum that
came from node n - 1, in pieces of 512 KiB, four on their way at once. From the last node with a contribution
the sum goes to its owner. Where rounds accumulate, the owner first sends its sum so far to node 0. (Another
order, groups of micro-batches summed first, would need a second accumulator everywhere and helps only nodes
whose ranks are whole groups.)

Gathers (`comm`). The ranks of a lane bring their slices into a buffer that their node shares, so a slice
comes to a node once. There are as many buffers as are ever gathered at once, worked out beforehand
(`sharding.layout`). A buffer is written again when all ranks of the node have given it back.

With `hybrid-shard` (`hybrid`) each node holds a full replica, sharded over its own ranks. All-gathers, norms
and shared parameters stay inside the node; reductions sum over all ranks, and the sum goes back along the
lane, since every node has an owner. Only node 0 writes checkpoints. `no-shard` uses the same owners and sums
where a node shares memory. `shard-grad-op` keeps its parameters whole on every rank and gathers them over
MPI.

Elements that a node sends to others for a unit of length L_u, of which the node owns o_n:

- a gather: (N - 1) o_n;
- the reduction of a round: L_u from each node but the last, L_u - o_n from the last, and o_n from all but
  node 0 where rounds accumulate;
- under `hybrid-shard`: no gathers, and L_u to each neighbour in every reduction, forth and back.

A rank that waits pushes all that is in flight, because another rank may need it. A rank that only looks at
counters must still call into the MPI library now and then: a request that is complete here may have left work
that another rank waits for (`MPIComm.poke_progress`). Nodes with unequal numbers of ranks, or ranks dealt to
nodes in turn, get the transport `mpi`, and `hybrid-shard` is refused.
"""
