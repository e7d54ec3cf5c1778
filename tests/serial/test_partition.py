"""Who owns what of a flat buffer, and how the buffer is cut into messages."""

from zero_mpi.comm import Partition


def test_lengths_beyond_32_bits():
    partition = Partition(5 * 2**31 + 3, 4, 1024)
    assert partition.bounds[-1] == 5 * 2**31 + 3
    assert all(count > 2**31 for count in partition.counts)
    assert all(max(piece.counts) <= 2**30 for piece in partition.cut(2**30))
    assert sum(sum(piece.counts) for piece in partition.cut(2**30)) == partition.length
