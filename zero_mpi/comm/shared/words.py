"""Layout of a rank's counters in shared memory: each begins a cache line, words have 8 bytes."""

POSTED, SUMMED, WRITTEN, GATHERED, RELEASED, TABLE = 0, 8, 16, 24, 32, 40
COUNTERS = range(POSTED, TABLE, 8)
ENTRIES = 64  # entries of the table
WORDS = TABLE + ENTRIES
RANK_BYTES = 8 * WORDS
