"""Initial values, which depend only on (seed, parameter name, position).

A parameter is drawn in blocks, each from a separate counter range of the Philox generator (Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", 2011). So a rank draws only the blocks that overlap its slice,
and the values do not depend on ranks, units or strategy.
"""

from __future__ import annotations

import hashlib

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Param
from zero_mpi.ops.elementary import normals

DRAW_BLOCK = 1 << 16  # elements of a block


def initial_values(name: str, param: Param, seed: int, start: int, stop: int) -> Array:
    """Return elements [start, stop) of the flattened initial values of a parameter, float32."""
    values = np.zeros(stop - start, np.float32)
    if param.init == "ones":
        values.fill(1)
    elif param.init == "normal":
        key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
        for begin in range(start - start % DRAW_BLOCK, stop, DRAW_BLOCK):
            first, last = max(start, begin), min(stop, begin + DRAW_BLOCK)
            count, counter = last - begin, [0, 0, 0, begin // DRAW_BLOCK]
            generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
            drawn = normals(generator, count + count % 2)  # some methods draw pairs of numbers
            values[first - start : last - start] = drawn[first - begin : count] * np.float32(param.std)
    return values
