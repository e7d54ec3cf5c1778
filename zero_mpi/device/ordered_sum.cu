// Adds the parts of several ranks, in the order of ranks and in float32:
//
//     out[i] = (((out[i] or nothing) + parts[0][i]) + parts[1][i]) + ...
//
// One thread computes each element, so results do not depend on how the work is cut. A launch adds up to
// MAX_PARTS parts; for more parts, further launches add to the earlier result. bf16 and fp16 are converted by
// their bits, so that no header is needed. Memory is read 4 elements at a time if all addresses are aligned.

constexpr int MAX_PARTS = 8;

struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };

union Word { unsigned int bits; float value; };

__device__ inline float wide(float x) { return x; }

__device__ inline float wide(bfloat16 x) {
    Word word;
    word.bits = (unsigned int)x.bits << 16;
    return word.value;
}

__device__ inline float wide(float16 x) {
    const unsigned int sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 1023u;
    Word word;
    if (exponent == 0) {  // zero or subnormal: mantissa times 2 to the -24th
        word.value = (float)mantissa * 5.9604644775390625e-8f;
        word.bits |= sign;
    } else {
        word.bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    }
    return word.value;
}

// Keeps subnormal numbers, as the host does, although CuPy compiles everything with -ftz=true.
__device__ inline float plus(float a, float b) {
#ifdef __CUDA_ARCH__
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
#else
    return a + b;
#endif
}

template <typename T>
struct alignas(4 * sizeof(T)) Four { T at[4]; };

template <typename T>
__device__ inline bool is_aligned(const T* x) { return (unsigned long long)x % sizeof(Four<T>) == 0; }

template <typename T>
__device__ inline void add_parts(float* out, const T* const (&parts)[MAX_PARTS], int count, int accumulate, long long n) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long stride = gridDim.x * (long long)blockDim.x;
    bool aligned = is_aligned(out);
#pragma unroll
    for (int part = 0; part < MAX_PARTS; part++) aligned = aligned && is_aligned(parts[part]);
    const long long fours = aligned ? n / 4 : 0;
    for (long long i = first; i < fours; i += stride) {
        Four<float> total = {{0, 0, 0, 0}};
        if (accumulate) total = reinterpret_cast<const Four<float>*>(out)[i];
#pragma unroll
        for (int part = 0; part < MAX_PARTS; part++) {
            if (part >= count) break;
            const Four<T> given = reinterpret_cast<const Four<T>*>(parts[part])[i];
            const bool begins = part == 0 && !accumulate;  // not 0 + x, because 0 + -0 loses the sign
#pragma unroll
            for (int j = 0; j < 4; j++) total.at[j] = begins ? wide(given.at[j]) : plus(total.at[j], wide(given.at[j]));
        }
        reinterpret_cast<Four<float>*>(out)[i] = total;
    }
    for (long long i = 4 * fours + first; i < n; i += stride) {
        float total = accumulate ? out[i] : 0;
#pragma unroll
        for (int part = 0; part < MAX_PARTS; part++) {
            if (part >= count) break;
            const float given = wide(parts[part][i]);
            total = part == 0 && !accumulate ? given : plus(total, given);
        }
        out[i] = total;
    }
}

// Parts from `count` on are not read, so their addresses may be anything.
#define ADD_PARTS(name, T)                                                                                      \
    extern "C" __global__ void name(float* out, const T* p0, const T* p1, const T* p2, const T* p3, const T* p4, \
                                    const T* p5, const T* p6, const T* p7, int count, int accumulate,           \
                                    long long n) {                                                              \
        const T* const parts[MAX_PARTS] = {p0, p1, p2, p3, p4, p5, p6, p7};                                     \
        add_parts<T>(out, parts, count, accumulate, n);                                                         \
    }

ADD_PARTS(add_float32, float)
ADD_PARTS(add_bfloat16, bfloat16)
ADD_PARTS(add_float16, float16)

// sums[i] = x[start] + ... + x[start + length - 1] in float64, in NumPy's order for up to 128 numbers: eight
// totals of every eighth number, added in pairs, then the remaining numbers.
extern "C" __global__ void pairwise_sums(const double* x, const long long* segments, double* sums, long long count) {
    const long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 8;
    const bool there = i < count;
    const long long start = there ? segments[i] : 0, length = there ? segments[count + i] : 0, whole = length / 8 * 8;
    const int lane = threadIdx.x % 8;
    double total = 0;
    for (long long j = lane; j < whole; j += 8) total += x[start + j];
    for (int way = 1; way < 8; way *= 2) total += __shfl_xor_sync(0xffffffffu, total, way);
    if (!there || lane) return;
    for (long long j = whole; j < length; j++) total += x[start + j];
    sums[i] = total;
}
