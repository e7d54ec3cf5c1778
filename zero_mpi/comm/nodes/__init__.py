"""Transport for several nodes: shared memory within a node, messages between nodes, sums in rank order.

With N nodes of L ranks each, rank l of every node belongs to lane l (`comm.topology`). Lanes send the data of
gathers (`comm`) and sums (`sums`) between nodes, so each element crosses a link once, not L times.

With `hybrid-shard` (`hybrid`) each node holds a full replica, sharded over its ranks. All-gathers, norms and
shared parameters stay inside the node. Reductions sum over all ranks in rank order. Each sum is sent back
along the lane, because every node has an owner for it. Checkpoints hold node 0's shards. `no-shard` uses the
same owners and sums if ranks share memory. `shard-grad-op` gathers full parameters on every rank over MPI.

Elements that a node sends to other nodes for a unit of L_u elements, of which the node owns o_n:

- a gather: (N - 1) o_n;
- the reduction of a round: L_u from each node except the last, L_u - o_n from the last, and o_n from all
  nodes except node 0 if rounds accumulate;
- under `hybrid-shard`: no gathers, and L_u to each neighbour in every reduction, in each direction.

A rank that waits advances all transfers in progress, because another rank may need them. A rank that only
reads counters must still call the MPI library now and then: after a request completes, the library may still
have work for which another rank waits (`MPIComm.poke_progress`).
"""
