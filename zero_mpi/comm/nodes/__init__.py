"""Ranks of several nodes: shared memory within a node, messages between them, sums in rank order.

With N nodes of L ranks each, rank l of every node forms lane l (`comm.topology`). Lanes carry what goes
between nodes, so a link carries each element once instead of L times: gathers (`comm`) and sums (`sums`).

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
that another rank waits for (`MPIComm.poke_progress`).
"""
