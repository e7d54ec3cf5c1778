"""Cross-entropy on a GPU: one block handles a row of logits and may replace the row by its gradient.

The loss is a 0-dimensional float64 array on the GPU, so that the host need not wait for it. Losses of rows
are summed in a fixed order.
"""

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.launch import ARRAY, F64, THREADS, Family, Kernel, at, by_rows, f4, packed, take
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import PACK

CONSUME_LOGITS = Family("loss.cu", "consume_logits", "PPPLPLLLF")
ADD_LOSSES = Kernel("loss.cu", "add_losses", "PPLDL")
MOST_THREADS = 1024  # maximum threads of a block, which works on one row


def losses_of_rows(z: Array, dz: Array | None, targets: Array, scale: float) -> Array:
    """Return -log softmax(z)[target] per row, float64; fill dz with the gradient of scale times their sum.

    z (N, V): any of the three types; the stride of rows may exceed V. dz may be z. targets (N,): integers.
    A row with target UNCOUNTED has no loss; any other target outside [0, V) makes the loss NaN.
    """
    kernel, (z, rows, width, step) = CONSUME_LOGITS[z.dtype], by_rows(z)
    ids, step_out = packed(targets), step if dz is None else by_rows(dz)[3]
    losses = take((rows,), F64)
    arguments = (z, at(dz), ids, ids.itemsize, losses, width, step, step_out, f4(scale))
    packs = -(-width * z.itemsize // PACK)
    kernel(rows, min(MOST_THREADS, -(-packs // 32) * 32), arguments)
    return losses


def add_losses(total: Array, losses: Array, scale: float, adds: bool) -> None:
    """Set `total`, one float64, to scale times the sum of losses; add to its old value if `adds`."""
    ADD_LOSSES(1, THREADS, (total, losses, losses.size, float(scale), int(adds)))


@implements(reference.cross_entropy, ARRAY)
def cross_entropy(logits: Array, targets: Array, scale: float) -> tuple[Array, Array]:
    """Compute `reference.cross_entropy`; the loss is a 0-dimensional array."""
    dlogits, total = take(logits.shape, logits.dtype), take((), F64)
    add_losses(total, losses_of_rows(logits, dlogits, targets, scale), scale, False)
    return total, dlogits
