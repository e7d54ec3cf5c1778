// A stable radix sort of 64-bit keys by some of their bits, eight bits at a time, without atomics. A block
// counts the digits of its 256 keys. Sums of these counts give the first index for each digit and block. A
// key goes to this index plus the number of earlier keys of its block with the same digit.

const int KEYS = 256;  // number of keys in a block, and also of values of a digit

DEVICE int digit_of(i64 key, i64 shift) { return (int)(key >> shift) & (KEYS - 1); }

// Count the digits of each block's keys. counts: (digits, blocks).
KERNEL __launch_bounds__(256) digit_counts(const i64* keys, u32* counts, i64 size, i64 shift) {
    __shared__ int digits[KEYS];
    i64 at = first_of_thread<1>();
    digits[threadIdx.x] = at < size ? digit_of(keys[at], shift) : -1;
    __syncthreads();
    u32 count = 0;
    for (int other = 0; other < KEYS; other++) count += digits[other] == (int)threadIdx.x;
    counts[(i64)threadIdx.x * gridDim.x + blockIdx.x] = count;
}

// Replace each count by the sum of the earlier counts. One block; each thread sums a range of counts.
KERNEL __launch_bounds__(1024) counts_before(u32* counts, i64 size) {
    __shared__ u32 room[1024];
    i64 span = (size + 1023) / 1024, first = threadIdx.x * span;
    i64 last = first + span < size ? first + span : size;
    u32 mine = 0;
    for (i64 i = first; i < last; i++) mine += counts[i];
    room[threadIdx.x] = mine;
    for (u32 way = 1; way < 1024; way *= 2) {
        __syncthreads();
        u32 more = threadIdx.x >= way ? room[threadIdx.x - way] : 0;
        __syncthreads();
        room[threadIdx.x] += more;
    }
    u32 before = room[threadIdx.x] - mine;
    for (i64 i = first; i < last; i++) {
        u32 count = counts[i];
        counts[i] = before;
        before += count;
    }
}

KERNEL __launch_bounds__(256) by_digit(const i64* keys, i64* sorted, const u32* starts, i64 size, i64 shift) {
    __shared__ int digits[KEYS];
    i64 at = first_of_thread<1>();
    int digit = at < size ? digit_of(keys[at], shift) : -1;
    digits[threadIdx.x] = digit;
    __syncthreads();
    if (at >= size) return;
    u32 rank = 0;
    for (u32 other = 0; other < threadIdx.x; other++) rank += digits[other] == digit;
    sorted[starts[(i64)digit * gridDim.x + blockIdx.x] + rank] = keys[at];
}
