"""Sizes of what operations take beside their results, in a module that everybody can import.

Of the packages of operations one compiles when it is imported and the other needs CuPy; a plan that counts
bytes wants neither.
"""

# Attention on the CPU.
BLOCK = 64  # rows: smaller ones cost calls, larger ones work above the diagonal
KEPT_WEIGHTS = 64 << 10  # elements of a head's blocks up to which they are kept

# Kernels of the GPU.
PACK = 16  # bytes that a thread loads at once
THREADS = 256  # of a block, where nothing else is said
COLUMN_ROWS, COLUMN_LINES = 32, 128  # of a sum over rows: rows of a line, and lines at most
RUN = 32  # sorted places that a thread of an embedding's gradient walks through, as in embedding.cu
HELD = 4  # packs of a norm's sums that a thread holds, as in norm.cu
NORM_LINES = 512  # of a norm's partial sums, at most

# Attention, heads and products on the GPU.
SCORES = 256 << 20  # bytes of float32 scores at a time, as far as one query a head needs no more
EVEN = 16  # queries that blocks are multiples of, where they have so many
SLOPES = 1 << 30  # bytes of cuDNN that grow with the square of T
LOGITS_BYTES = 256 << 20  # of logits at a time: each time a head reads its weights and adds to dw once
LINE = 8  # elements that a row of logits is a multiple of, so that rows are aligned
WORKSPACE = 32 << 20  # bytes for cuBLASLt on Hopper and later
