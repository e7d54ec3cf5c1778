"""Digests of tensors: the same from a whole and from the slices of any number of ranks."""

import hashlib

import numpy as np
import pytest
import xxhash

from zero_mpi.checkpoint.sound import digest, digest_of_pieces, digest_of_state, piece_digests
from zero_mpi.comm import Partition


def test_it_is_the_sha256_of_the_xxh3_of_4096_bytes():
    raw = np.random.default_rng(0).bytes(10000)
    parts = [xxhash.xxh3_128(raw[at : at + 4096]).digest() for at in (0, 4096, 8192)]
    assert digest(raw) == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 9000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 20])
def test_slices_give_the_digest_of_the_whole(size, ranks):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    partition = Partition(size, ranks, 1024)
    parts = [piece_digests(values[partition.part(rank)]) for rank in range(ranks)]
    assert digest_of_pieces(parts) == digest(values)


def test_one_bit_and_one_place_show():
    values = np.zeros(5000, np.float32)
    found = {digest(values)}
    for place in (0, 1023, 1024, 4999):
        other = values.copy()
        other.view(np.uint32)[place] ^= 1
        found.add(digest(other))
    assert len(found) == 5


def test_the_digest_of_a_state_knows_names_and_not_their_order():
    state = {"a": digest(b"1"), "b": digest(b"2")}
    assert digest_of_state(state) == digest_of_state(dict(reversed(state.items())))
    assert digest_of_state(state) != digest_of_state({"a": state["b"], "b": state["a"]})
