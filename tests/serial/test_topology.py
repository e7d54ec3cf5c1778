"""What a rank asks of the nodes of a job is looked up once, however often a sum asks."""

from zero_mpi.comm.topology import Topology


class Counted(tuple):
    looks = 0

    def __iter__(self):
        Counted.looks += 1
        return super().__iter__()


def test_a_place_among_thousands_of_nodes_is_found_once():
    nodes, per_node = 4096, 4
    members = Counted(tuple(range(n * per_node, (n + 1) * per_node)) for n in range(nodes))
    topology = Topology(members, nodes * per_node - 2)
    Counted.looks = 0
    assert [(topology.node, topology.local) for _ in range(100)] == [(nodes - 1, per_node - 2)] * 100
    assert Counted.looks == 1
