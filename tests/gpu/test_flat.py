"""Operations on flat GPU buffers are bit-identical to the reference, for any cut and alignment."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zero_mpi import ops
from zero_mpi.device.ordered_sum import ordered_sum_on_gpu, pairwise_sums
from zero_mpi.ops import reference

pytestmark = pytest.mark.world(1)  # a single process

F32, BF16, F16 = (np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16))
KINDS = [F32, BF16, F16]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
RATES = {"grad_scale": 0.37, "lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": 3}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape)).astype(np.float32)


def state(size: int) -> list[np.ndarray]:
    """Return p, g, m and v; some values and squares are below the smallest normal number."""
    p, g, m, v = (numbers(size, seed=s) for s in range(4))
    g[::5] *= np.float32(1e-21)
    m[::7] *= np.float32(1e-9)
    v[::7] *= np.float32(1e-38)
    return [p, g, m, np.abs(v)]


def there(gpu: Any, x: np.ndarray, first: int = 0) -> Any:
    buffer = np.zeros(x.size + first, x.dtype)
    buffer[first:] = x
    return gpu.from_host(buffer)[first:]


@every_kind
@pytest.mark.parametrize(("size", "runs"), [(1, 1), (7, 7), (1024, 1), (4096, 4), (21, 3), (6000, 5), (0, 0)])
def test_adamw_has_the_bits_of_the_reference(gpu, size, runs, kind):
    decay = 0.1 * np.arange(runs, dtype=np.float64)
    exact, low = state(size), np.zeros(size, kind)
    reference.adamw(*exact, **RATES, decay=decay, low=low)
    for first in (0, 1):
        ours, rounded = [there(gpu, x, first) for x in state(size)], there(gpu, np.zeros(size, kind), first)
        ops.adamw(*ours, **RATES, decay=gpu.from_host(decay), low=rounded)
        assert [gpu.to_host(x).tobytes() for x in (*ours, rounded)] == [x.tobytes() for x in (*exact, low)]
    ours = [gpu.from_host(x) for x in state(size)]
    ops.adamw(*ours, **RATES, decay=decay)  # decay on the host, as for arrays outside units
    assert [gpu.to_host(x).tobytes() for x in ours] == [x.tobytes() for x in exact]


@pytest.mark.parametrize(("count", "chunk"), [(1, 1), (5, 3), (3, 1024), (33, 130), (2, 5000)])
def test_squares_of_chunks(gpu, count, chunk):
    g = numbers(count * chunk)
    squares = gpu.to_host(ops.chunk_squares(gpu.from_host(g), chunk))
    assert squares.dtype == np.float64
    exact = [math.fsum(float(x) ** 2 for x in run) for run in g.reshape(count, chunk)]
    np.testing.assert_allclose(squares, exact, rtol=1e-14)
    moved = ops.chunk_squares(there(gpu, g, 1), chunk)
    assert gpu.to_host(moved).tobytes() == squares.tobytes(), "alignment changes bits"
    pieces = [ops.chunk_squares(gpu.from_host(run), chunk) for run in g.reshape(count, chunk)]
    assert [float(one[0]) for one in pieces] == squares.tolist(), "other chunks change bits"


def test_sums_of_pairs_are_those_of_numpy(gpu):
    x = numbers(5000).astype(np.float64) ** 2
    lengths = np.arange(1, 129)
    starts = np.arange(lengths.size) * 37
    actual = gpu.to_host(pairwise_sums(gpu.from_host(x), gpu.from_host(np.stack([starts, lengths]))))
    expected = [x[start : start + length].sum() for start, length in zip(starts, lengths, strict=True)]
    assert actual.tolist() == expected


def ordered(out: np.ndarray, parts: list[np.ndarray], accumulate: bool) -> np.ndarray:
    """Return ((out + p0) + p1) + ..., the sum in the order of the host's transports."""
    wide = [part.astype(np.float32) for part in parts]
    total = out + wide[0] if accumulate else wide[0].copy()
    for part in wide[1:]:
        total += part
    return total


@every_kind
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 9, 17])
def test_sums_over_ranks_are_in_their_order(gpu, ranks, accumulate, kind):
    size, out = 1003, numbers(1003, seed=99)
    parts = [np.clip(numbers(size, seed=rank), -6e4, 6e4).astype(kind) for rank in range(ranks)]
    for x in (out, *parts):
        x[5] = -0.0  # a sum that begins with +0 would lose the sign of -0
    expected = ordered(out, parts, accumulate)
    for first in (0, 3):
        sums, copies = there(gpu, out, first), [there(gpu, part, rank % 3) for rank, part in enumerate(parts)]
        for start, stop in [(0, 400), (400, 401), (401, size)] if first else [(0, size)]:
            ordered_sum_on_gpu(
                sums[start:stop], [part[start:stop] for part in copies], accumulate, gpu.stream
            )
        assert gpu.to_host(sums).tobytes() == expected.tobytes()


@every_kind
def test_an_empty_slice_has_an_empty_sum(gpu, kind):
    ordered_sum_on_gpu(gpu.zeros(0), [gpu.zeros(0, kind)] * 3, True, gpu.stream)


def special() -> np.ndarray:
    """Return every float16 and bfloat16, the midpoints between neighbours, and the ends of float32."""
    raw = np.arange(1 << 16, dtype=np.uint16)
    low = [raw.view(kind).astype(np.float32) for kind in (F16, BF16)]
    with np.errstate(over="ignore", invalid="ignore"):
        halfway = [(x + np.nextafter(x, np.float32(np.inf))) / 2 for x in low]
        ties = [np.append(x[:-1] + (x[1:] - x[:-1]) / 2, 0).astype(np.float32) for x in low]
    ends = [np.finfo(np.float32).max, np.finfo(np.float32).tiny, 1e-45, 65520, 65519.996]
    ends = np.array(ends, np.float32)
    return np.concatenate([*low, *halfway, *ties, ends, -ends])


@every_kind
def test_numbers_are_rounded_to_nearest_and_widened_exactly(gpu, kind):
    """AdamW writes parameters rounded to low precision; a kernel reads normal numbers back exactly."""
    x = special()
    with np.errstate(all="ignore"):
        expected = [x.copy(), *[np.zeros(x.size, np.float32) for _ in range(3)]]
        narrowed = np.zeros(x.size, kind)
        reference.adamw(*expected, **RATES, decay=np.zeros(1), low=narrowed)
    numbers_only = ~np.isnan(expected[0])
    assert numbers_only.sum() > 300_000
    for first in (0, 1):
        narrow = there(gpu, np.zeros(x.size, kind), first)
        arrays = [there(gpu, part, first) for part in (x, *(np.zeros_like(x) for _ in range(3)))]
        ops.adamw(*arrays, **RATES, decay=np.zeros(1), low=narrow)
        written, read = gpu.to_host(narrow), gpu.to_host(ops.scale(narrow, 1.0))
        assert written[numbers_only].tobytes() == narrowed[numbers_only].tobytes()
        # CuPy compiles with -ftz=true: most kernels read a subnormal float32 as 0.
        normal = numbers_only & (np.abs(narrowed.astype(np.float32)) >= np.finfo(np.float32).tiny)
        assert read[normal].tobytes() == narrowed[normal].tobytes()
        for values in (written, read):
            assert np.isnan(values[~numbers_only].astype(np.float32)).all()
