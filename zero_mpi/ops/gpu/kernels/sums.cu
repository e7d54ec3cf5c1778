// Sums over rows in two stages, without atomics: blocks write lines of partial sums, and a second kernel adds
// the lines in order to a gradient of any type.

const int LINES = 8;  // threads of a block that share a column

// Sum x (rows, width; stride ld) into partial (parts, width). Part p sums every parts-th group of eight rows.
template <class T>
DEVICE void column_sums(const T* x, float* partial, i64 rows, i64 width, i64 ld, i64 parts) {
    const int N = Packs<T>::SIZE;
    __shared__ float room[LINES * 32 * 8];
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 part = blockIdx.x % parts, first = blockIdx.x / parts * (32 * N), at = first + lane * N;
    float v[N], sums[N] = {};
    if (at < width)
        for (i64 row = part * LINES + line; row < rows; row += parts * LINES) {
            load(v, x + row * ld + at, width - at);
#pragma unroll
            for (int j = 0; j < N; j++) sums[j] += v[j];
        }
#pragma unroll
    for (int j = 0; j < N; j++) room[line * (32 * N) + lane * N + j] = sums[j];
    __syncthreads();
    int column = threadIdx.x;  // there are 256 threads, and never more columns
    if (column >= 32 * N || first + column >= width) return;
    float total = room[column];
    for (int other = 1; other < LINES; other++) total += room[other * (32 * N) + column];
    partial[part * width + first + column] = total;
}

// Compute out (width,) += the sum of partial (parts, width) over its lines. If there are twice as many blocks
// as the width needs, the second half computes the same for `others` and `theirs`.
template <class G>
DEVICE void add_partials(G* out, const float* partial, G* others, const float* theirs, i64 parts, i64 width) {
    __shared__ float room[LINES * 32];
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 column = (i64)blockIdx.x * 32 + lane, tiles = (width + 31) / 32;
    if (blockIdx.x >= tiles) column -= tiles * 32, out = others, partial = theirs;
    float total = 0.0f;
    if (column < width)
#pragma unroll 8  // to overlap the reads; the order of additions does not change
        for (i64 part = line; part < parts; part += LINES) total += partial[part * width + column];
    room[threadIdx.x] = total;
    __syncthreads();
    if (line > 0 || column >= width) return;
    for (int other = 1; other < LINES; other++) total += room[other * 32 + lane];
    narrow(widen(out[column]) + total, out[column]);
}

#define INSTANCES(T)                                                                                         \
    KERNEL __launch_bounds__(256)                                                                            \
        column_sums_##T(const T* x, float* partial, i64 rows, i64 width, i64 ld, i64 parts) {                \
        column_sums<T>(x, partial, rows, width, ld, parts);                                                  \
    }                                                                                                        \
    KERNEL __launch_bounds__(256) add_partials_##T(T* out, const float* partial, T* others,                  \
                                                   const float* theirs, i64 parts, i64 width) {              \
        add_partials<T>(out, partial, others, theirs, parts, width);                                         \
    }

INSTANCES(f32)
INSTANCES(bf16)
INSTANCES(f16)
