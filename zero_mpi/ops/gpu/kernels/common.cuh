// Common code of all kernels: element types, packs of 16 bytes, sums over neighbouring threads.
//
// This text is put before each source, so a source includes no file and any NVRTC compiles it. Numbers are
// widened to float32 when they are loaded and rounded once, to nearest even, when they are stored. A kernel
// is a template over the element type and has one extern "C" instance for each type.

typedef long long i64;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__ __attribute__((unused))
#define KERNEL extern "C" __global__ void
#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

const u32 WHOLE_WARP = 0xffffffffu;

// ------------------------------------------------------------------------------------------ element types

typedef float f32;
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

DEVICE float widen(f32 x) { return x; }

DEVICE float widen(bf16 x) { return __int_as_float((int)((u32)x.bits << 16)); }

DEVICE float widen(f16 x) {
#ifdef EMULATED
    return float_of_half_bits(x.bits);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

DEVICE void narrow(float x, f32& y) { y = x; }

DEVICE void narrow(float x, bf16& y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    u32 bits = (u32)__float_as_int(x);
    bool is_number = (bits & 0x7fffffffu) <= 0x7f800000u;
    y.bits = is_number ? (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : (u16)0x7fff;
#endif
}

DEVICE void narrow(float x, f16& y) {
#ifdef EMULATED
    y.bits = half_bits_of_float(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
}

// float32 arithmetic as on the host: each operation is rounded, and subnormal numbers are kept. The
// intrinsics (such as __fmul_rn) would flush them to zero, because CuPy compiles everything with -ftz=true.
#ifdef EMULATED
#define AS_ON_THE_HOST(name, operation, written) \
    DEVICE float name(float a, float b) { return a operation b; }
DEVICE float root(float x) { return __fsqrt_rn(x); }
DEVICE double squared(float x) { return (double)x * (double)x; }
#else
#define AS_ON_THE_HOST(name, operation, written)                       \
    DEVICE float name(float a, float b) {                              \
        float y;                                                       \
        asm(written " %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); \
        return y;                                                      \
    }
DEVICE float root(float x) {
    float y;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE double squared(float x) {  // exact: a product of two 24-bit numbers
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return __dmul_rn(y, y);
}
#endif
AS_ON_THE_HOST(plus, +, "add.rn.f32")
AS_ON_THE_HOST(minus, -, "sub.rn.f32")
AS_ON_THE_HOST(times, *, "mul.rn.f32")
AS_ON_THE_HOST(over, /, "div.rn.f32")

// exp, as accurate as the result's type needs: the fast version has an error of about 1e-6.
template <class T>
DEVICE float exponential(float x) {
    return __expf(x);
}
template <>
__device__ __forceinline__ __attribute__((unused)) float exponential<f32>(float x) {
    return expf(x);
}

// ------------------------------------------------------------------------------------------------- packs

template <class T>
struct Packs {
    static const int SIZE = 16 / sizeof(T);
};  // number of elements in a pack

template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T item[N];
};

template <class T, int N>
DEVICE bool aligned(const T* p) {
    return ((u64)p & (alignof(Pack<T, N>) - 1)) == 0;
}

// A pack in the format of memory: words need half as many registers as 16-bit elements.
struct alignas(16) Words {
    u32 word[4];
};

DEVICE f32 element(const Words& raw, int j, f32) { return __int_as_float((int)raw.word[j]); }

template <class T>
DEVICE T element(const Words& raw, int j, T) {
    return T{(u16)(raw.word[j / 2] >> (j % 2 * 16))};
}

template <class T, int N>
DEVICE void widen(float (&x)[N], const Words& raw) {
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = widen(element(raw, j, T{}));
}

// Load a pack without widening it. Only `count` elements exist; all later elements become 0.
template <class T>
DEVICE void fetch(Words& raw, const T* p, i64 count) {
    const int N = Packs<T>::SIZE;
    if (count >= N && aligned<T, N>(p)) {
        raw = *(const Words*)p;
    } else {
        Pack<T, N> items;
#pragma unroll
        for (int j = 0; j < N; j++) items.item[j] = j < count ? p[j] : T{};
        raw = *(const Words*)&items;
    }
}

// Load N elements. Only `count` exist; all later elements become `fill`.
template <class T, int N>
DEVICE void load(float (&x)[N], const T* p, i64 count, float fill = 0.0f) {
    if (count >= N && aligned<T, N>(p)) {
        Pack<T, N> raw = *(const Pack<T, N>*)p;
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = widen(raw.item[j]);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = j < count ? widen(p[j]) : fill;
    }
}

template <class T, int N>
DEVICE void store(T* p, const float (&x)[N], i64 count) {
    if (count >= N && aligned<T, N>(p)) {
        Pack<T, N> raw;
#pragma unroll
        for (int j = 0; j < N; j++) narrow(x[j], raw.item[j]);
        *(Pack<T, N>*)p = raw;
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < count) narrow(x[j], p[j]);
    }
}

// Return the index of this thread's first element in a flat array, if each thread processes N elements.
template <int N>
DEVICE i64 first_of_thread() {
    return ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N;
}

// Position in a matrix that is divided into tiles of one row and blockDim.x packs.
struct Place {
    i64 row, column;
};

template <int N>
DEVICE Place place_in_rows(i64 width) {
    u32 span = blockDim.x * N, tiles = (u32)((width + span - 1) / span);
    return {(i64)(blockIdx.x / tiles), (i64)(blockIdx.x % tiles) * span + threadIdx.x * N};
}

// Return an integer of 1, 2 (both unsigned), 4 or 8 bytes: tokens have the same type as in their file.
DEVICE i64 whole_number(const void* ids, i64 bytes, i64 at) {
    if (bytes == 8) return ((const i64*)ids)[at];
    if (bytes == 4) return ((const int*)ids)[at];
    return bytes == 2 ? (i64)((const u16*)ids)[at] : (i64)((const unsigned char*)ids)[at];
}

// -------------------------------------------------------------------------------------------------- sums

// Return the sum of `value` over each `lanes` neighbouring threads, a power of two; all threads of the block
// must call it. The order is fixed: a butterfly inside warps, then warps one after the other.
DEVICE float sum_of_lanes(float value, int lanes) {
    __shared__ float of_warp[32];
    for (int way = (lanes < 32 ? lanes : 32) / 2; way > 0; way /= 2)
        value += __shfl_xor_sync(WHOLE_WARP, value, way);
    if (lanes <= 32) return value;
    __syncthreads();  // a thread may still read the sums of the last call
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    int first = threadIdx.x / lanes * (lanes / 32);
    float total = of_warp[first];
    for (int other = 1; other < lanes / 32; other++) total += of_warp[first + other];
    return total;
}
