// The softmax of attention, between two matrix products. A block of threads computes one row of scores.
//
// Scores are (B K, n R, ld) float32: n queries of R heads that share keys, row t R + r. Query t of the n sees
// the first m - n + t + 1 of m keys; the other weights are zeros. Weights have the type of the inputs, for
// the next product. In float32 they may overwrite the scores, as a thread writes only elements that it read.

// begins (B, T), or null: the first key that a query sees. The weights of earlier keys are zeros as well.

const int WIDTH = 4;  // elements of a pack: 16 bytes of scores

struct Row {
    i64 start, seen, sum;  // offset of the row, end of the keys it sees, index of its logarithm in (B, H, T)
    __device__ Row(i64 m, i64 ld, i64 queries, i64 shared, i64 length, i64 first) {
        i64 number = blockIdx.x, inside = number % (queries * shared), t = inside / shared;
        start = number * ld;
        seen = m - queries + t + 1;
        sum = (number / (queries * shared) * shared + inside % shared) * length + first + t;
    }
};

// Return the largest `value` in the block, in a fixed order; `fmaxf` ignores NaN.
DEVICE float most_of_block(float value) {
    __shared__ float of_warp[32];
    for (int way = 16; way > 0; way /= 2) value = fmaxf(value, __shfl_xor_sync(WHOLE_WARP, value, way));
    __syncthreads();  // a thread may still read the values of the last call
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    float most = of_warp[0];
    for (int other = 1; other < (int)blockDim.x / 32; other++) most = fmaxf(most, of_warp[other]);
    return most;
}

// Turn scores into weights. sums: logarithm of each row's sum of exponentials; read if `again`, else written.
template <class T>
DEVICE void weights(const float* scores, T* p, float* sums, const i64* begins, i64 m, i64 ld, i64 queries,
                    i64 shared, i64 kv, i64 length, i64 first, i64 again) {
    Row row(m, ld, queries, shared, length, first);
    i64 group = blockIdx.x / (queries * shared), t = blockIdx.x % (queries * shared) / shared;
    i64 from_key = begins ? begins[group / kv * length + first + t] : 0;
    const float* from = scores + row.start;
    float v[WIDTH], less, share = 1.0f;
    i64 begin = threadIdx.x * WIDTH, step = blockDim.x * WIDTH;
    if (again) {
        less = sums[row.sum];
    } else {
        float most = -INFINITE, total = 0.0f;
        for (i64 at = begin; at < row.seen; at += step) {
            load(v, from + at, row.seen - at, -INFINITE);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) most = at + j < from_key ? most : fmaxf(most, v[j]);
        }
        less = most_of_block(most);
        for (i64 at = begin; at < row.seen; at += step) {
            load(v, from + at, row.seen - at, -INFINITE);
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                total += from_key <= at + j && at + j < row.seen ? exponential<T>(v[j] - less) : 0.0f;
        }
        total = sum_of_lanes(total, blockDim.x);
        share = 1.0f / total;
        if (threadIdx.x == 0) sums[row.sum] = less + logf(total);
    }
    for (i64 at = begin; at < m; at += step) {
        load(v, from + at, row.seen - at, 0.0f);
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            v[j] = from_key <= at + j && at + j < row.seen ? exponential<T>(v[j] - less) * share : 0.0f;
        store(p + row.start + at, v, m - at);
    }
}

// Turn weights p and their gradient d into the gradient of the unscaled scores: p (d - sum(p d)) scale.
template <class T>
DEVICE void slopes(const float* d, T* p, i64 m, i64 ld, i64 queries, i64 shared, float scale) {
    Row row(m, ld, queries, shared, 0, 0);
    float v[WIDTH], weight[WIDTH], along = 0.0f;
    i64 begin = threadIdx.x * WIDTH, step = blockDim.x * WIDTH;
    for (i64 at = begin; at < row.seen; at += step) {
        load(v, d + row.start + at, row.seen - at);
        load(weight, p + row.start + at, row.seen - at);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) along += weight[j] * v[j];
    }
    along = sum_of_lanes(along, blockDim.x);
    for (i64 at = begin; at < row.seen; at += step) {  // p stays zero at unseen keys
        load(v, d + row.start + at, row.seen - at);
        load(weight, p + row.start + at, row.seen - at);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) v[j] = weight[j] * (v[j] - along) * scale;
        store(p + row.start + at, v, row.seen - at);
    }
}

// Copy (B, K, T, width) between two orders of axes; a block of threads copies one of the B K T rows.
template <class S, class T>
DEVICE void move(const S* from, T* to, i64 kv, i64 length, i64 width, i64 from_b, i64 from_k, i64 from_t, i64 to_b,
                 i64 to_k, i64 to_t) {
    const int N = Packs<T>::SIZE;
    i64 t = blockIdx.x % length, k = blockIdx.x / length % kv, b = blockIdx.x / (length * kv);
    from += b * from_b + k * from_k + t * from_t;
    to += b * to_b + k * to_k + t * to_t;
    float v[N];
    for (i64 at = threadIdx.x * N; at < width; at += blockDim.x * N) {
        load(v, from + at, width - at);
        store(to + at, v, width - at);
    }
}

#define INSTANCES(T)                                                                                             \
    KERNEL __launch_bounds__(256)                                                                                \
        attention_weights_##T(const float* scores, T* p, float* sums, const i64* begins, i64 m, i64 ld,          \
                              i64 queries, i64 shared, i64 kv, i64 length, i64 first, i64 again) {               \
        weights<T>(scores, p, sums, begins, m, ld, queries, shared, kv, length, first, again);                   \
    }                                                                                                            \
    KERNEL __launch_bounds__(256)                                                                                \
        attention_slopes_##T(const float* d, T* p, i64 m, i64 ld, i64 queries, i64 shared, float scale) {        \
        slopes<T>(d, p, m, ld, queries, shared, scale);                                                          \
    }

INSTANCES(f32)
INSTANCES(bf16)
INSTANCES(f16)

#define MOVES(S, T)                                                                                              \
    KERNEL __launch_bounds__(256)                                                                                \
        attention_move_##S##_##T(const S* from, T* to, i64 kv, i64 length, i64 width, i64 from_b, i64 from_k,    \
                                 i64 from_t, i64 to_b, i64 to_k, i64 to_t) {                                     \
        move<S, T>(from, to, kv, length, width, from_b, from_k, from_t, to_b, to_k, to_t);                       \
    }

MOVES(f32, f32)
MOVES(bf16, bf16)
MOVES(f16, f16)
MOVES(f32, bf16)
MOVES(f32, f16)
