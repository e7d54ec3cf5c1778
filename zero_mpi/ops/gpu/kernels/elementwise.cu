// Elementwise operations: sums, GELU, SwiGLU, rotary positions. A thread computes one pack of 16 bytes.

const float GELU_TWICE_SCALE = 1.5957691216057308f;  // 2 sqrt(2 / pi)
const float GELU_CUBIC = 0.044715f;

// Return 1 / (1 + e^-x). If e^-x overflows, the result is 0, which is correct.
template <class T>
DEVICE float logistic(float x) {
    return 1.0f / (1.0f + exponential<T>(-x));
}

// Return GELU(x) / x = (1 + tanh(u)) / 2 = 1 / (1 + e^-2u).
template <class T>
DEVICE float gelu_share(float x) {
    return logistic<T>(GELU_TWICE_SCALE * (x + GELU_CUBIC * x * x * x));
}

template <class T>
DEVICE void add(const T* x, const T* y, T* out, i64 size) {
    const int N = Packs<T>::SIZE;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    float a[N], b[N];
    load(a, x + at, size - at);
    load(b, y + at, size - at);
#pragma unroll
    for (int j = 0; j < N; j++) a[j] += b[j];
    store(out + at, a, size - at);
}

// Compute out = factor x [+ plus].
template <class T>
DEVICE void scale(const T* x, const T* plus, T* out, float factor, i64 size) {
    const int N = Packs<T>::SIZE;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    float a[N], more[N];
    load(a, x + at, size - at);
#pragma unroll
    for (int j = 0; j < N; j++) a[j] *= factor;
    if (plus) {
        load(more, plus + at, size - at);
#pragma unroll
        for (int j = 0; j < N; j++) a[j] += more[j];
    }
    store(out + at, a, size - at);
}

// Compute out = x + b [+ plus]. Rows of x, plus and out have a stride of ld elements; out may be x.
template <class T>
DEVICE void add_row(const T* x, const T* b, const T* plus, T* out, i64 width, i64 ld_x, i64 ld_plus,
                    i64 ld_out) {
    const int N = Packs<T>::SIZE;
    Place here = place_in_rows<N>(width);
    i64 at = here.column, count = width - at;
    if (count <= 0) return;
    float a[N], more[N];
    load(a, x + here.row * ld_x + at, count);
    load(more, b + at, count);
#pragma unroll
    for (int j = 0; j < N; j++) a[j] += more[j];
    if (plus) {
        load(more, plus + here.row * ld_plus + at, count);
#pragma unroll
        for (int j = 0; j < N; j++) a[j] += more[j];
    }
    store(out + here.row * ld_out + at, a, count);
}

template <class T>
DEVICE void gelu(const T* x, T* y, i64 size) {
    const int N = Packs<T>::SIZE;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    float v[N];
    load(v, x + at, size - at);
#pragma unroll
    for (int j = 0; j < N; j++) v[j] *= gelu_share<T>(v[j]);
    store(y + at, v, size - at);
}

template <class T>
DEVICE void gelu_backward(const T* dy, const T* x, T* dx, i64 size) {
    const int N = Packs<T>::SIZE;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    float d[N], v[N];
    load(d, dy + at, size - at);
    load(v, x + at, size - at);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float s = gelu_share<T>(v[j]);
        float slope = GELU_TWICE_SCALE * (1.0f + 3.0f * GELU_CUBIC * v[j] * v[j]);
        d[j] *= s + v[j] * (s * (1.0f - s)) * slope;
    }
    store(dx + at, d, size - at);
}

template <class T>
DEVICE void swiglu(const T* gate, const T* up, T* y, i64 size) {
    const int N = Packs<T>::SIZE;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    float g[N], u[N];
    load(g, gate + at, size - at);
    load(u, up + at, size - at);
#pragma unroll
    for (int j = 0; j < N; j++) g[j] *= logistic<T>(g[j]) * u[j];
    store(y + at, g, size - at);
}

template <class T>
DEVICE void swiglu_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, i64 size) {
    const int N = Packs<T>::SIZE;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    float d[N], g[N], u[N];
    load(d, dy + at, size - at);
    load(g, gate + at, size - at);
    load(u, up + at, size - at);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float s = logistic<T>(g[j]), v = g[j];
        g[j] = d[j] * u[j] * (s * (1.0f + v * (1.0f - s)));
        u[j] = d[j] * (v * s);
    }
    store(dgate + at, g, size - at);
    store(dup + at, u, size - at);
}

template <class T>
DEVICE void geglu(const T* gate, const T* up, T* y, i64 size) {
    const int N = Packs<T>::SIZE;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    float g[N], u[N];
    load(g, gate + at, size - at);
    load(u, up + at, size - at);
#pragma unroll
    for (int j = 0; j < N; j++) g[j] *= gelu_share<T>(g[j]) * u[j];
    store(y + at, g, size - at);
}

template <class T>
DEVICE void geglu_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, i64 size) {
    const int N = Packs<T>::SIZE;
    i64 at = first_of_thread<N>();
    if (at >= size) return;
    float d[N], g[N], u[N];
    load(d, dy + at, size - at);
    load(g, gate + at, size - at);
    load(u, up + at, size - at);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float s = gelu_share<T>(g[j]), v = g[j];
        float slope = GELU_TWICE_SCALE * (1.0f + 3.0f * GELU_CUBIC * v * v);
        g[j] = d[j] * u[j] * (s + v * (s * (1.0f - s)) * slope);
        u[j] = d[j] * (v * s);
    }
    store(dgate + at, g, size - at);
    store(dup + at, u, size - at);
}

// Rotate (a, b) by an angle with cosine c, sine s. Products are rounded before they are added, as on CPUs.
DEVICE void turn(float& a, float& b, float c, float s) {
    float first = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
    b = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    a = first;
}

// x, out (B, T, H, 2 half or more) have strides of sequences, positions, heads. A block computes a position.
template <class T, bool INTERLEAVED>
DEVICE void rope(const T* x, T* out, const float* cos, const float* sin, i64 length, i64 heads, i64 half,
                 i64 x_b, i64 x_t, i64 x_h, i64 out_b, i64 out_t, i64 out_h) {
    const int N = Packs<T>::SIZE, PAIRS = INTERLEAVED ? N / 2 : N;
    i64 b = blockIdx.x / length, t = blockIdx.x % length;
    int packs = (int)((half + PAIRS - 1) / PAIRS);
    for (int piece = threadIdx.x; piece < packs * heads; piece += blockDim.x) {
        i64 head = piece / packs, pair = (i64)(piece % packs) * PAIRS, count = half - pair;
        const T* from = x + b * x_b + t * x_t + head * x_h;
        T* to = out + b * out_b + t * out_t + head * out_h;
        float c[PAIRS], s[PAIRS], v[N];
        load(c, cos + t * half + pair, count);
        load(s, sin + t * half + pair, count);
        if constexpr (INTERLEAVED) {
            load(v, from + 2 * pair, 2 * count);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) turn(v[2 * j], v[2 * j + 1], c[j], s[j]);
            store(to + 2 * pair, v, 2 * count);
        } else {
            float second[N];
            load(v, from + pair, count);
            load(second, from + half + pair, count);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) turn(v[j], second[j], c[j], s[j]);
            store(to + pair, v, count);
            store(to + half + pair, second, count);
        }
    }
}

#define INSTANCES(T)                                                                                         \
    KERNEL add_##T(const T* x, const T* y, T* out, i64 size) { add<T>(x, y, out, size); }                    \
    KERNEL scale_##T(const T* x, const T* plus, T* out, float factor, i64 size) {                            \
        scale<T>(x, plus, out, factor, size);                                                                \
    }                                                                                                        \
    KERNEL add_row_##T(const T* x, const T* b, const T* plus, T* out, i64 width, i64 ld_x, i64 ld_plus,      \
                       i64 ld_out) {                                                                         \
        add_row<T>(x, b, plus, out, width, ld_x, ld_plus, ld_out);                                           \
    }                                                                                                        \
    KERNEL gelu_##T(const T* x, T* y, i64 size) { gelu<T>(x, y, size); }                                     \
    KERNEL gelu_backward_##T(const T* dy, const T* x, T* dx, i64 size) {                                     \
        gelu_backward<T>(dy, x, dx, size);                                                                   \
    }                                                                                                        \
    KERNEL swiglu_##T(const T* gate, const T* up, T* y, i64 size) { swiglu<T>(gate, up, y, size); }          \
    KERNEL swiglu_backward_##T(const T* dy, const T* gate, const T* up, T* dgate, T* dup, i64 size) {        \
        swiglu_backward<T>(dy, gate, up, dgate, dup, size);                                                  \
    }                                                                                                        \
    KERNEL geglu_##T(const T* gate, const T* up, T* y, i64 size) { geglu<T>(gate, up, y, size); }            \
    KERNEL geglu_backward_##T(const T* dy, const T* gate, const T* up, T* dgate, T* dup, i64 size) {         \
        geglu_backward<T>(dy, gate, up, dgate, dup, size);                                                   \
    }                                                                                                        \
    KERNEL rope_interleaved_##T(const T* x, T* out, const float* cos, const float* sin, i64 length,          \
                                i64 heads, i64 half, i64 x_b, i64 x_t, i64 x_h, i64 out_b, i64 out_t,        \
                                i64 out_h) {                                                                 \
        rope<T, true>(x, out, cos, sin, length, heads, half, x_b, x_t, x_h, out_b, out_t, out_h);            \
    }                                                                                                        \
    KERNEL rope_halves_##T(const T* x, T* out, const float* cos, const float* sin, i64 length, i64 heads,    \
                           i64 half, i64 x_b, i64 x_t, i64 x_h, i64 out_b, i64 out_t, i64 out_h) {           \
        rope<T, false>(x, out, cos, sin, length, heads, half, x_b, x_t, x_h, out_b, out_t, out_h);           \
    }

INSTANCES(f32)
INSTANCES(bf16)
INSTANCES(f16)
