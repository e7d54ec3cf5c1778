// Operations on flat buffers: AdamW in one pass, and sums of squares of chunks.
//
// Results must be bit-identical however a buffer is cut or aligned. So each element or chunk is computed by
// itself, and AdamW calls a function for each rounding, so that no multiplication and addition are fused. The
// roundings are NumPy's, also for subnormal numbers.

// The update of `reference.adamw`. decay: weight decay of each run of `run` elements;
// `shift` is the logarithm of `run` if it is a power of two, else -1. low may be null.
template <class T>
DEVICE void adamw(float* p, const float* g, float* m, float* v, const double* decay, T* low, i64 size,
                  i64 run, i64 shift, double lr, float scale, float beta1, float rest1, float beta2,
                  float rest2, float root_c2, float eps, float rate) {
    const int N = 4;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    i64 count = size - at;
    float parameter[N], d[N], first[N], second[N];
    load(parameter, p + at, count);
    load(d, g + at, count);
    load(first, m + at, count);
    load(second, v + at, count);
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j >= count) continue;
        i64 number = shift >= 0 ? (at + j) >> shift : (at + j) / run;
        float kept = (float)__dsub_rn(1.0, __dmul_rn(lr, decay[number]));
        float step = times(d[j], scale);
        first[j] = plus(times(first[j], beta1), times(rest1, step));
        second[j] = plus(times(second[j], beta2), times(times(step, step), rest2));
        float below = plus(over(root(second[j]), root_c2), eps);
        parameter[j] = minus(times(parameter[j], kept), times(over(first[j], below), rate));
    }
    store(p + at, parameter, count);
    store(m + at, first, count);
    store(v + at, second, count);
    if (low) store(low + at, parameter, count);
}

// Compute sums[c] = the float64 sum of squares of g[c chunk ... (c + 1) chunk], one warp per chunk. The order
// does not depend on alignment, and the square of a float32 is exact in float64.
KERNEL __launch_bounds__(256) chunk_squares(const float* g, double* sums, i64 count, i64 chunk) {
    const int N = 4;
    i64 number = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (number >= count) return;  // the same for all 32 threads of a warp
    float v[N];
    double total = 0.0;
    for (i64 at = lane * N; at < chunk; at += 32 * N) {
        load(v, g + number * chunk + at, chunk - at);
#pragma unroll
        for (int j = 0; j < N; j++) total = __dadd_rn(total, squared(v[j]));
    }
    for (int way = 16; way > 0; way /= 2) total = __dadd_rn(total, __shfl_xor_sync(WHOLE_WARP, total, way));
    if (lane == 0) sums[number] = total;
}

#define INSTANCES(T)                                                                                         \
    KERNEL __launch_bounds__(256)                                                                            \
        adamw_##T(float* p, const float* g, float* m, float* v, const double* decay, T* low, i64 size,       \
                  i64 run, i64 shift, double lr, float scale, float beta1, float rest1, float beta2,         \
                  float rest2, float root_c2, float eps, float rate) {                                       \
        adamw<T>(p, g, m, v, decay, low, size, run, shift, lr, scale, beta1, rest1, beta2, rest2, root_c2,   \
                 eps, rate);                                                                                 \
    }

INSTANCES(f32)
INSTANCES(bf16)
INSTANCES(f16)
