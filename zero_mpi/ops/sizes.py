"""Sizes of the buffers that operations need besides their results. This module imports no operation.

`ops.cpu` needs numba and `ops.gpu` needs CuPy, but a plan that counts bytes must load
neither. Operations and the plan therefore both use the numbers and formulas of this module.
"""

from collections.abc import Callable

from zero_mpi.device.arrays import side_by_side
from zero_mpi.device.types import Array

# Attention on the CPU.
BLOCK = 64  # rows: smaller blocks need more calls, larger blocks compute more scores above the diagonal
KEYS = 512  # maximum number of keys in a tile, whose scores stay in cache
LONG = 1024  # a sequence of at least this many rows is divided into early and late rows
KEPT_WEIGHTS = 64 << 10  # a head with at most this many weights keeps them for backward
LOW_BLOCK = 128  # rows in bfloat16: a product by oneDNN takes ten microseconds to begin
LOW_TILE = 256 << 10  # scores that bfloat16 attention computes in one call: they fit in cache

# Kernels of the GPU.
PACK = 16  # bytes that a thread loads at once
THREADS = 256  # threads of a block, by default
COLUMN_ROWS, COLUMN_LINES = 32, 128  # sums over rows: minimum rows per partial sum; maximum number of them
RUN = 32  # sorted positions that a thread handles in an embedding's gradient, as in embedding.cu
HELD = 4  # packs of a norm's sums that a thread holds, as in norm.cu
NORM_LINES = 512  # maximum number of partial sums of a norm's gradient

# Attention, heads and products on the GPU.
SCORES = 256 << 20  # maximum bytes of float32 scores at a time, unless one query per head already needs more
EVEN = 16  # the maximum number of queries in a block is a multiple of this, or smaller than this
SLOPES = 4 << 30  # maximum bytes of cuDNN's backward buffers that grow with the square of T
LOGITS_BYTES = 2 << 30  # maximum bytes of logits per chunk; each chunk reads a head's weights once
LARGE_GPU = 40e9  # bytes of memory; smaller GPUs use SLOPES / 4 and LOGITS_BYTES / 8
LINE = 8  # a row of logits is padded to a multiple of LINE elements: products of other lengths are slow
WORKSPACE = 32 << 20  # bytes of cuBLASLt's workspace on Hopper and later GPUs


def gradients_like(q: Array, k: Array, v: Array, take: Callable[..., Array]) -> tuple[Array, Array, Array]:
    """Return arrays for dq, dk and dv by take(shape, type): columns of one array if q, k and v are, too."""
    joint = side_by_side((q, k, v))
    if joint is None:
        return take(q.shape, q.dtype), take(k.shape, k.dtype), take(v.shape, v.dtype)
    buffer = take((*q.shape[:2], joint.shape[-1]), q.dtype)
    first = q.shape[2] * q.shape[3]
    second = first + k.shape[2] * k.shape[3]
    dq, dk, dv = buffer[..., :first], buffer[..., first:second], buffer[..., second:]
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def head_weights(length: int, total: int, block: int = BLOCK) -> int:
    """Return the number of weights that a head computes for `length` queries and `total` keys, by blocks."""
    blocks, offset = -(-length // block), total - length
    weights = block * ((blocks - 1) * offset + block * ((blocks - 1) * blocks // 2))
    return weights + (length - (blocks - 1) * block) * total


def attention_tile(q: Array, k: Array, v: Array, keep: bool) -> tuple[int, int, int, int]:
    """Return numbers for a float32 tile: rows per head, keys, scores, and elements of its other buffers."""
    (_, length, heads, width), (total, of_keys, tall) = q.shape, v.shape[1:]
    shared, keys = heads // of_keys, total if keep else min(total, KEYS)
    rows = min(length, BLOCK * max(1, min(4 // shared, length // LONG)))  # products need many rows
    return rows, keys, shared * rows * keys, shared * rows * (2 * width + tall + 1)


def early_keys(length: int, total: int) -> int:
    """Return the number of keys that a long sequence's early rows (half the work) see; 0 if it is short."""
    return total - length + int(length * 0.5**0.5) // BLOCK * BLOCK if length >= LONG else 0


def unseen_weights(begins: Array, block: int = BLOCK) -> int:
    """Return the number of attention weights per head, summed over the sequences, that blocks of rows skip.

    begins (B, T): the first key that each row sees. A block skips the keys that none of its rows sees.
    """
    length = begins.shape[1]
    return sum(min(block, length - r) * int(begins[:, r].sum()) for r in range(0, length, block))


def tile_heads(batch: int, heads: int, length: int, total: int) -> tuple[int, int]:
    """Return how many (sequences, key heads) bfloat16 attention computes per call; `heads`: all key heads."""
    most = max(1, LOW_TILE // (min(length, LOW_BLOCK) * total))
    return min(batch, max(1, most // heads)), min(most, heads)


def low_tile(batch: int, heads: int, length: int, total: int) -> int:
    """Return the maximum number of scores in a tile of bfloat16 attention; `heads`: number of key heads."""
    sequences, group = tile_heads(batch, heads, length, total)
    last = (length - 1) % LOW_BLOCK + 1
    return sequences * group * max(last * total, LOW_BLOCK * (total - last) if last < length else 0)


def column_lines(rows: int) -> int:
    """Return the number of lines of partial sums over `rows` rows."""
    return min(COLUMN_LINES, -(-rows // COLUMN_ROWS))


def norm_lanes(width: int, pack: int, per_thread: int) -> int:
    """Return the threads per row, a power of two: one per pack, or per `per_thread` packs in wide rows."""
    packs = -(-width // pack)
    threads = packs if packs <= 32 else max(32, -(-packs // per_thread))
    return min(THREADS, 1 << (threads - 1).bit_length())


def norm_blocks(rows: int, lanes: int) -> int:
    """Return the number of blocks of a norm's forward; backward has at most NORM_LINES lines of sums."""
    return -(-rows // (THREADS // lanes))


def embedding_runs(tokens: int) -> int:
    """Return the number of runs of sorted positions; each has partial sums for its first and last token."""
    return -(-tokens // RUN)


def scores_across(total: int) -> int:
    """Return the elements from the start of a row of scores to the next: a multiple of 8, for alignment."""
    return -(-total // 8) * 8


def score_rows(heads: int, total: int) -> int:
    """Return the maximum number of queries in a block; `heads`: the number of heads of all sequences."""
    most = max(1, SCORES // (4 * heads * scores_across(total)))
    return most // EVEN * EVEN if most > EVEN else most


def cudnn_group(shape: tuple[int, ...], kv: int, most: float) -> tuple[int, int]:
    """Return (sequences, key/value heads) per cuDNN backward of up to `most` bytes; shape: q (B, T, H, D).

    One call computes all heads if a single head needs more bytes or if parts of the logarithms are unaligned.
    """
    batch, length, heads, _ = shape
    fit = int(min(most / slopes_of(heads // kv, length), batch * kv))  # key/value heads at a time
    if length % 4 or not fit:
        return batch, kv
    parts = (n for n in range(min(fit, kv), 0, -1) if kv % n == 0)
    return next(n for n in range(max(1, fit // kv), 0, -1) if batch % n == 0), next(parts)


def most_slopes(memory: float = LARGE_GPU) -> int:
    """Return the maximum bytes of scores that cuDNN's backward may use on a GPU with `memory` bytes."""
    return SLOPES if memory >= LARGE_GPU else SLOPES // 4


def slopes_of(heads: int, length: int) -> int:
    """Return the bytes of the 16-bit scores of `heads` heads, in blocks of 64 by 128."""
    return 2 * heads * (-(-length // 64) * 64) * (-(-length // 128) * 128)


def cudnn_slopes(shape: tuple[int, ...], kv: int) -> int:
    """Return the bytes that cuDNN's backward needs: scores, or float32 dq if a head has too many scores."""
    batch, length, heads, width = shape
    sequences, group = cudnn_group(shape, kv, SLOPES)
    slopes = slopes_of(sequences * group * (heads // kv), length)
    return slopes if slopes <= SLOPES else 4 * batch * length * heads * width


def logit_width(vocabulary: int) -> int:
    """Return the elements of a row of logits, padded to a multiple of LINE."""
    return -(-vocabulary // LINE) * LINE


def logit_rows(n: int, row_bytes: int, memory: float = LARGE_GPU) -> int:
    """Return the rows of logits per chunk on a GPU of `memory` bytes: n rows in equal, bounded chunks."""
    most = LOGITS_BYTES if memory >= LARGE_GPU else LOGITS_BYTES // 8
    chunks = max(1, -(-n * row_bytes // most))
    return max(1, -(-n // chunks))


def check_kept(*pairs: tuple[Array | None, int]) -> None:
    """Raise ValueError unless the arrays kept by attention's forward have the sizes that backward expects."""
    for x, size in pairs:
        if x is not None and x.size != size:
            shape = f"{x.shape} {x.dtype}"
            raise ValueError(f"causal_attention_backward: expected {size} elements from forward; got {shape}")


def run_length(p: Array, runs: Array) -> int:
    return max(1, int(p.size) // max(1, int(runs.size)))
