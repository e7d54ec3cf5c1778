"""Elementary functions and normal random numbers, bit-identical on every machine if requested.

The C library's functions differ in the last bit between versions and processors. So do NumPy's functions,
which call the C library or use their own vector code. Under `--bits portable` this module's functions replace
both. All use only operations that IEEE 754 rounds in exactly one way (sums, products, quotients, square
roots, and powers of two by their bits) and `decimal`, which does not use the processor's floats. Other runs
use the libraries' functions. Training code takes these functions from here, never from `math` or NumPy.
"""

import math
import operator
from collections.abc import Callable, Iterable
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.environment import portable

T = TypeVar("T")

CONTEXT = Context(prec=40)
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42fefa2000p-1"), float.fromhex("0x1.9ef35793c7673p-41")
ROOT_HALF = math.sqrt(0.5)
QUARTER_TURN = tuple(
    map(float.fromhex, ("0x1.921fb54400000p+0", "0x1.0b4611a600000p-34", "0x1.3198a2e037073p-69"))
)
TURN = float.fromhex("0x1.921fb54442d18p+2")
MOST_ANGLE = 2.0**20  # below this angle, multiples of the first two parts of pi/2 are exact
SINE = [(-1) ** n / math.factorial(2 * n + 1) for n in range(9, 0, -1)]  # Taylor series, highest order first
EXPONENTIAL = [1 / math.factorial(n) for n in range(14, 0, -1)]
COSINE = [(-1) ** n / math.factorial(2 * n) for n in range(9, 1, -1)]


def log_of_parts(m: Any, e: Any) -> Any:
    """Return the logarithm of m 2^e to 1 ulp, for scalars or arrays m from sqrt(1/2) to sqrt(2).

    log m = 2 artanh s, by its series, for s = (m - 1) / (m + 1). The first term is computed separately,
    because s is rounded and this term needs a correction.
    """
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = z * (2 / 19 + z * (2 / 21 + z * (2 / 23)))
    series = z * (2 / 11 + z * (2 / 13 + z * (2 / 15 + z * (2 / 17 + series))))
    series = z * (2 / 3 + z * (2 / 5 + z * (2 / 7 + z * (2 / 9 + series))))
    half = 0.5 * f * f
    return e * LN2_HIGH + (f - (half - (s * (half + series) + e * LN2_LOW)))


def log_of_array(x: Array) -> Array:
    """Return the float64 logarithms of finite numbers above 0."""
    m, e = np.frexp(x)
    small = m < ROOT_HALF
    return log_of_parts(np.where(small, m + m, m), (e - small).astype(np.float64))


def exp_of_array(x: Array) -> Array:
    """Return e^x to 2 ulp for float64 numbers of at most 0; numbers below -745 are treated as -745."""
    x = np.maximum(x, -745.0)
    count = np.floor(x * (1 / (LN2_HIGH + LN2_LOW)) + 0.5)
    rest = (x - count * LN2_HIGH) - count * LN2_LOW
    return np.ldexp(1.0 + series(rest, EXPONENTIAL), count.astype(np.int32))


def decimal_log(x: float) -> float:
    """Return the logarithm of a number above 0, rounded once. Raise ValueError for other numbers."""
    if not x > 0:
        raise ValueError(f"the logarithm of {x}: expected a number above 0")
    return float(Decimal(x).ln(CONTEXT))


@lru_cache(maxsize=256)
def decimal_power(x: float, y: float) -> float:
    """Return x^y, rounded once, for x >= 0; if x is 0, y must not be negative."""
    return float(CONTEXT.power(Decimal(x), Decimal(y))) if x and y else float(not y)


def power_by_decimal(x: float, y: Any) -> Any:
    """Return x^y for a number x and one exponent or an array of exponents."""
    if isinstance(y, np.ndarray):
        return np.array([decimal_power(float(x), float(exponent)) for exponent in y.flat]).reshape(y.shape)
    return decimal_power(float(x), float(y))


def series(z: Array, factors: Iterable[float]) -> Array:
    """Return the polynomial z (f_n + z (f_n-1 + ...)), where f_n is the last of `factors`."""
    total = np.zeros_like(z)
    for factor in factors:
        total = (total + factor) * z
    return total


def sine_of_array(x: Array, turns: int = 0) -> Array:
    """Return the float64 sines of x plus `turns` quarter turns, to 3 ulp."""
    r = np.asarray(x, np.float64)
    assert not r.size or np.abs(r).max() < MOST_ANGLE, "a larger angle would lose precision"
    count = np.floor(r * (2 / math.pi) + 0.5)
    for part in QUARTER_TURN:
        r = r - count * part
    quarter, z = count.astype(np.int64) + turns, r * r
    sine = r + r * series(z, SINE)
    cosine = 1.0 - (0.5 * z - z * series(z, COSINE))
    return np.where(quarter & 1, cosine, sine) * np.where(quarter & 2, -1.0, 1.0)


def cosine_of_array(x: Array) -> Array:
    """Return the float64 cosines of angles, to 3 ulp."""
    return sine_of_array(x, 1)


def cosine_of_number(x: float) -> float:
    return float(cosine_of_array(np.array(x)))


def normals_by_turns(generator: np.random.Generator, count: int) -> Array:
    """Return `count` standard normal float32 numbers; `count` must be even (Box and Muller, 1958)."""
    u = generator.random(count)  # exact on all machines: random integers times a power of two
    radius = np.sqrt(-2.0 * log_of_array(1.0 - u[::2]))
    angle = TURN * u[1::2]
    pairs = np.stack((radius * cosine_of_array(angle), radius * sine_of_array(angle)), axis=1)
    return pairs.astype(np.float32).ravel()


def choose(replacement: Callable[..., T], library: Callable[..., T]) -> Callable[..., T]:
    """Return `replacement` under `--bits portable`, and `library` otherwise."""
    return replacement if portable.active else library


log: Callable[[float], float] = choose(decimal_log, math.log)
power: Callable[[Any, Any], Any] = choose(power_by_decimal, operator.pow)
cosine: Callable[[float], float] = choose(cosine_of_number, math.cos)
logs: Callable[[Array], Array] = choose(log_of_array, np.log)
exps: Callable[[Array], Array] = choose(exp_of_array, np.exp)
cosines: Callable[[Array], Array] = choose(cosine_of_array, np.cos)
sines: Callable[[Array], Array] = choose(sine_of_array, np.sin)
normals: Callable[[np.random.Generator, int], Array] = choose(
    normals_by_turns, lambda generator, count: generator.standard_normal(count, np.float32)
)
