// Cross-entropy. A block reads a row of logits once for the maximum and the sum of exponentials, and a second
// time to write the gradient, which may overwrite the logits. Large blocks keep the number of rows in progress
// small, so that the second time reads from the second-level cache. Losses of rows are float64 and summed in
// row order.

// Maximum of the logits so far, and the sum of e^(logit - maximum).
struct Soft {
    float greatest, sum;
};

template <class T>
DEVICE Soft joined(Soft a, Soft b) {
    float greatest = fmaxf(a.greatest, b.greatest);
    return {greatest,
            a.sum * exponential<T>(a.greatest - greatest) + b.sum * exponential<T>(b.greatest - greatest)};
}

// Join the parts of all threads of a block. All threads get bit-identical results.
template <class T>
DEVICE Soft joined_in_block(Soft mine) {
    __shared__ float greatest[32];
    __shared__ float sum[32];
    for (int way = 16; way > 0; way /= 2)
        mine = joined<T>(mine, {__shfl_down_sync(WHOLE_WARP, mine.greatest, way),
                                __shfl_down_sync(WHOLE_WARP, mine.sum, way)});
    if (threadIdx.x % 32 == 0) greatest[threadIdx.x / 32] = mine.greatest, sum[threadIdx.x / 32] = mine.sum;
    __syncthreads();
    Soft all = {greatest[0], sum[0]};
    for (int warp = 1; warp < blockDim.x / 32; warp++) all = joined<T>(all, {greatest[warp], sum[warp]});
    return all;
}

const i64 UNCOUNTED = -1;  // a row with this target has no loss, and a gradient of zeros

// Rows of z have a stride of ld_z elements. dz: output for the gradient; may be z or null.
template <class T>
DEVICE void consume_logits(const T* z, T* dz, const void* targets, i64 id_bytes, double* losses, i64 width,
                           i64 ld_z, i64 ld_dz, float scale) {
    const int N = Packs<T>::SIZE;
    i64 row = blockIdx.x, target = whole_number(targets, id_bytes, row), step = (i64)blockDim.x * N;
    const T* from = z + row * ld_z;
    float v[N];
    if (target == UNCOUNTED) {
        if (threadIdx.x == 0) losses[row] = 0.0;
        for (int j = 0; j < N; j++) v[j] = 0.0f;
        for (i64 at = threadIdx.x * N; dz && at < width; at += step) store(dz + row * ld_dz + at, v, width - at);
        return;
    }
    bool known = target >= 0 && target < width;
    float picked = known ? widen(from[target]) : NOT_A_NUMBER;
    Soft mine = {-3.402823466e38f, 0.0f};  // not -infinity, because subtracting it from itself gives NaN
    for (i64 at = threadIdx.x * N; at < width; at += step) {
        load(v, from + at, width - at, -INFINITE);
        float most = mine.greatest;
#pragma unroll
        for (int j = 0; j < N; j++) most = fmaxf(most, v[j]);
        mine.sum *= exponential<T>(mine.greatest - most);
        mine.greatest = most;
#pragma unroll
        for (int j = 0; j < N; j++) mine.sum += exponential<T>(v[j] - most);
    }
    Soft all = joined_in_block<T>(mine);  // after its barrier, all threads have read `picked` from z
    if (threadIdx.x == 0) losses[row] = log((double)all.sum) - (double)(picked - all.greatest);
    if (!dz) return;
    float share = scale / all.sum;
    for (i64 at = threadIdx.x * N; at < width; at += step) {
        load(v, from + at, width - at);
#pragma unroll
        for (int j = 0; j < N; j++) {
            v[j] = exponential<T>(v[j] - all.greatest) * share;
            if (at + j == target) v[j] -= scale;
        }
        store(dz + row * ld_dz + at, v, width - at);
    }
}

// Compute total = [total +] scale times the sum of losses (rows,), in one block.
KERNEL __launch_bounds__(256)
    add_losses(double* total, const double* losses, i64 rows, double scale, i64 adds) {
    __shared__ double room[256];
    double sum = 0.0;
    for (i64 row = threadIdx.x; row < rows; row += 256) sum += losses[row];
    room[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) room[threadIdx.x] += room[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *total = __dadd_rn(adds ? *total : 0.0, __dmul_rn(scale, room[0]));
}

#define INSTANCES(T)                                                                                         \
    KERNEL __launch_bounds__(1024)                                                                           \
        consume_logits_##T(const T* z, T* dz, const void* targets, i64 id_bytes, double* losses, i64 width,  \
                           i64 ld_z, i64 ld_dz, float scale) {                                               \
        consume_logits<T>(z, dz, targets, id_bytes, losses, width, ld_z, ld_dz, scale);                      \
    }

INSTANCES(f32)
INSTANCES(bf16)
INSTANCES(f16)
