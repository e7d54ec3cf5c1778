// RMSNorm and LayerNorm. `lanes` neighbouring threads compute a row. Forward reads a row in several passes, which
// hit the first-level cache after the first pass. Backward also sums the gradients of w and b: a block sums over
// its rows, in order, and writes one line of partial sums; `add_partials` (sums.cu) adds the lines.

const int HELD = 4,
          HELD_TWICE = 3;  // packs of sums per thread in backward: for dw alone, for dw and db

struct Lanes {
    int count, lane, group, groups;  // group: threads that share a row; groups: their number in a block
    __device__ Lanes(i64 lanes)
        : count((int)lanes),
          lane(threadIdx.x % (int)lanes),
          group(threadIdx.x / (int)lanes),
          groups(blockDim.x / (int)lanes) {}
};

template <class T>
DEVICE void rms_norm(const T* x, const T* w, T* y, float* r, i64 rows, i64 width, i64 lanes, float eps) {
    const int N = Packs<T>::SIZE;
    Lanes mine(lanes);
    i64 row = (i64)blockIdx.x * mine.groups + mine.group, step = mine.count * N;
    i64 end = row < rows ? width : 0;  // threads beyond the last row process no elements
    const T* from = x + row * width;
    float v[N], weight[N], square = 0.0f;
    for (i64 at = mine.lane * N; at < end; at += step) {
        load(v, from + at, width - at);
#pragma unroll
        for (int j = 0; j < N; j++) square += v[j] * v[j];
    }
    square = sum_of_lanes(square, mine.count);
    float q = 1.0f / sqrtf(square / (float)width + eps);
    if (end && mine.lane == 0) r[row] = q;
    for (i64 at = mine.lane * N; at < end; at += step) {
        load(v, from + at, width - at);
        load(weight, w + at, width - at);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = v[j] * q * weight[j];
        store(y + row * width + at, v, width - at);
    }
}

template <class T>
DEVICE void layer_norm(const T* x, const T* w, const T* b, T* y, float* mean, float* r, i64 rows, i64 width,
                       i64 lanes, float eps) {
    const int N = Packs<T>::SIZE;
    Lanes mine(lanes);
    i64 row = (i64)blockIdx.x * mine.groups + mine.group, step = mine.count * N;
    i64 end = row < rows ? width : 0;
    const T* from = x + row * width;
    float v[N], weight[N], shift[N], total = 0.0f, square = 0.0f;
    for (i64 at = mine.lane * N; at < end; at += step) {
        load(v, from + at, width - at);
#pragma unroll
        for (int j = 0; j < N; j++) total += v[j];
    }
    float middle = sum_of_lanes(total, mine.count) / (float)width;
    for (i64 at = mine.lane * N; at < end; at += step) {  // centred values avoid cancellation
        load(v, from + at, width - at, middle);
#pragma unroll
        for (int j = 0; j < N; j++) square += (v[j] - middle) * (v[j] - middle);
    }
    float q = 1.0f / sqrtf(sum_of_lanes(square, mine.count) / (float)width + eps);
    if (end && mine.lane == 0) mean[row] = middle, r[row] = q;
    for (i64 at = mine.lane * N; at < end; at += step) {
        load(v, from + at, width - at);
        load(weight, w + at, width - at);
        load(shift, b + at, width - at);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = (v[j] - middle) * q * weight[j] + shift[j];
        store(y + row * width + at, v, width - at);
    }
}

// Write one line of partial sums: for each column of the tile, add the sums of the block's groups in order.
template <int N, int PACKS>
DEVICE void write_partial(float* partial, const float (&sums)[PACKS][N], const Lanes& mine, i64 first,
                          i64 width) {
    __shared__ float room[256 * PACKS * N];
    int columns = mine.count * PACKS * N;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PACKS; k++)
#pragma unroll
        for (int j = 0; j < N; j++)
            room[mine.group * columns + (k * mine.count + mine.lane) * N + j] = sums[k][j];
    __syncthreads();
    for (int column = threadIdx.x; column < columns && first + column < width; column += blockDim.x) {
        float total = room[column];
        for (int group = 1; group < mine.groups; group++) total += room[group * columns + column];
        partial[first + column] = total;
    }
}

// Backward of both norms; rows wider than a thread's sums are cut into tiles. A thread reads all its packs of dy,
// x and plus once, before it uses any. RMSNorm's backward is LayerNorm's without mean and without mean(d).
//   dx = r (d - mean(d) - n mean(d n)) [+ plus],  d = dy w,  n = (x - mean) r
template <class T, bool CENTRED>
DEVICE void norm_backward(const T* dy, const T* x, const T* w, const float* mean, const float* r,
                          const T* plus, T* dx, float* partial_w, float* partial_b, i64 rows, i64 width,
                          i64 lanes) {
    const int N = Packs<T>::SIZE, PACKS = CENTRED ? HELD_TWICE : HELD;
    Lanes mine(lanes);
    // 64-bit variables would need more registers.
    const int columns = (int)width, step = mine.count * N, tile = step * PACKS;
    const int tiles = (columns + tile - 1) / tile, first = blockIdx.x % tiles * tile + mine.lane * N;
    i64 line = blockIdx.x / tiles, stride = gridDim.x / tiles * mine.groups;
    Words above[PACKS], input[PACKS], more[PACKS];
    float d[N], v[N], weight[N], sums[PACKS][N] = {}, shifts[CENTRED ? PACKS : 1][N] = {};
    for (i64 start = line * mine.groups; start < rows; start += stride) {  // equal in all threads of a block
        i64 row = start + mine.group, begin = row * width;
        int end = row < rows ? columns : 0;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            int at = first + k * step;
            fetch(above[k], dy + begin + at, end - at);
            fetch(input[k], x + begin + at, end - at);
            if (plus) fetch(more[k], plus + begin + at, end - at);
        }
        float q = end ? r[row] : 0.0f, middle = CENTRED && end ? mean[row] : 0.0f;
        float total = 0.0f, along = 0.0f;
        auto add = [&] {
#pragma unroll
            for (int j = 0; j < N; j++) {
                float turned = d[j] * weight[j];
                if (CENTRED) total += turned;
                along += turned * (v[j] - middle);
            }
        };
        if (tiles == 1) {
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                widen<T>(d, above[k]), widen<T>(v, input[k]);
                load(weight, w + first + k * step, columns - first - k * step);
                add();
            }
        } else {
            for (int at = mine.lane * N; at < end; at += step) {
                load(d, dy + begin + at, columns - at);
                load(v, x + begin + at, columns - at);
                load(weight, w + at, columns - at);
                add();
            }
        }
        if (CENTRED) total = sum_of_lanes(total, mine.count) / (float)columns;
        along = sum_of_lanes(along, mine.count) * q * q / (float)columns;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            int at = first + k * step;
            if (at >= end) continue;
            widen<T>(d, above[k]), widen<T>(v, input[k]);
            load(weight, w + at, columns - at);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float centred = v[j] - middle;
                v[j] = q * (d[j] * weight[j] - total - centred * along);
                sums[k][j] += d[j] * centred * q;
                if constexpr (CENTRED) shifts[k][j] += d[j];
            }
            if (plus) {
                widen<T>(weight, more[k]);
#pragma unroll
                for (int j = 0; j < N; j++) v[j] = weight[j] + v[j];
            }
            store(dx + begin + at, v, columns - at);
        }
    }
    if (partial_w) write_partial(partial_w + line * width, sums, mine, first - mine.lane * N, width);
    if constexpr (CENTRED)
        if (partial_b) write_partial(partial_b + line * width, shifts, mine, first - mine.lane * N, width);
}

// On an H100, rms_norm_backward is faster with 212 registers and 8 warps per processor than with 128, which spill
// 420 bytes; layer_norm_backward is faster with 128 and 16 warps, which spill 20 bytes.
#define INSTANCES(T)                                                                                         \
    KERNEL __launch_bounds__(256)                                                                            \
        rms_norm_##T(const T* x, const T* w, T* y, float* r, i64 rows, i64 width, i64 lanes, float eps) {    \
        rms_norm<T>(x, w, y, r, rows, width, lanes, eps);                                                    \
    }                                                                                                        \
    KERNEL __launch_bounds__(256)                                                                            \
        rms_norm_backward_##T(const T* dy, const T* x, const T* w, const float* r, const T* plus, T* dx,     \
                              float* partial_w, i64 rows, i64 width, i64 lanes) {                            \
        norm_backward<T, false>(dy, x, w, nullptr, r, plus, dx, partial_w, nullptr, rows, width, lanes);     \
    }                                                                                                        \
    KERNEL __launch_bounds__(256) layer_norm_##T(const T* x, const T* w, const T* b, T* y, float* mean,      \
                                                 float* r, i64 rows, i64 width, i64 lanes, float eps) {      \
        layer_norm<T>(x, w, b, y, mean, r, rows, width, lanes, eps);                                         \
    }                                                                                                        \
    KERNEL __launch_bounds__(256, 2) layer_norm_backward_##T(                                                \
        const T* dy, const T* x, const T* w, const float* mean, const float* r, const T* plus, T* dx,        \
        float* partial_w, float* partial_b, i64 rows, i64 width, i64 lanes) {                                \
        norm_backward<T, true>(dy, x, w, mean, r, plus, dx, partial_w, partial_b, rows, width, lanes);       \
    }

INSTANCES(f32)
INSTANCES(bf16)
INSTANCES(f16)
