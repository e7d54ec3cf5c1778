"""Who owns what of a flat buffer, and how the buffer is cut into messages."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_mpi.comm import Partition

partitions = st.builds(
    Partition, st.integers(0, 3000), st.integers(1, 17), st.sampled_from([1, 2, 7, 64, 1024])
)


@settings(deadline=None)
@given(partitions)
def test_slices_cover_the_buffer_in_order_and_are_even_to_one_quantum(partition):
    assert len(partition.bounds) == partition.parts + 1
    positions = np.arange(partition.length)
    slices = [positions[partition.part(rank)] for rank in range(partition.parts)]
    assert np.array_equal(np.concatenate(slices), positions)
    assert [part.size for part in slices] == list(partition.counts)
    assert all(b % partition.quantum == 0 or b == partition.length for b in partition.bounds)
    quanta = [-(-count // partition.quantum) for count in partition.counts]
    assert max(quanta) - min(quanta) <= 1
    assert quanta == sorted(quanta, reverse=True)


def test_lengths_beyond_32_bits():
    partition = Partition(5 * 2**31 + 3, 4, 1024)
    assert partition.bounds[-1] == 5 * 2**31 + 3
    assert all(count > 2**31 for count in partition.counts)
    assert all(max(piece.counts) <= 2**30 for piece in partition.cut(2**30))
    assert sum(sum(piece.counts) for piece in partition.cut(2**30)) == partition.length
