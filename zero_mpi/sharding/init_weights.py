"""Initial values, as a function of (seed, parameter name, position) and of nothing else.

A parameter is drawn in blocks, each from its own counter range of the Philox generator (Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", 2011): a rank draws only the blocks that its slice touches,
and the values do not depend on ranks, units or strategy.
"""

from __future__ import annotations

import hashlib

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Param
from zero_mpi.ops.elementary import normals

DRAW_BLOCK = 1 << 16  # elements


def initial_values(name: str, param: Param, seed: int, start: int, stop: int) -> Array:
    """Return elements [start, stop) of the flattened parameter at the start of training, float32."""
    values = np.zeros(stop - start, np.float32)
    if param.init == "ones":
        values.fill(1)
    elif param.init == "normal":
        for begin in range(start - start % DRAW_BLOCK, stop, DRAW_BLOCK):
            first, last = max(start, begin), min(stop, begin + DRAW_BLOCK)
            drawn = draw_block(name, seed, begin // DRAW_BLOCK, last - begin)[first - begin :]
            np.multiply(drawn, np.float32(param.std), out=values[first - start : last - start])
    elif param.init != "zeros":
        raise ValueError(
            f"parameter {name}: init {param.init!r} is not known; expected normal, ones or zeros"
        )
    return values


def draw_block(name: str, seed: int, block: int, count: int) -> Array:
    """Return the first standard normal numbers (count,) of a parameter's block, whatever its others are."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, block]))
    return normals(generator, count + count % 2)[:count]  # some ways to draw give pairs
