// Embedding: rows by token, and the gradient of these rows without atomics.
//
// Backward sorts keys (token, position) once; invalid tokens count as V. The sorted positions are cut into
// runs of RUN. In a run, positions of the same token are adjacent and summed in order. If all positions of a
// token are in one run, the sum goes directly to the token's row. Otherwise each run writes a partial sum,
// and the run in which the token begins adds them up. Each element is written by one thread, once.

const int RUN = 32;

DEVICE i64 token_of(i64 key) { return key >> 32; }
DEVICE i64 place_of(i64 key) { return key & 0xffffffff; }

// Compute y[i] = w[ids[i]]. An invalid token gives NaN, so that the error is noticed.
template <class T>
DEVICE void embedding(const void* ids, i64 id_bytes, const T* w, T* y, i64 width, i64 vocabulary) {
    const int N = Packs<T>::SIZE;
    Place here = place_in_rows<N>(width);
    i64 at = here.column, count = width - at, id = whole_number(ids, id_bytes, here.row);
    if (count <= 0) return;
    bool known = id >= 0 && id < vocabulary;
    float v[N];
    load(v, w + (known ? id : 0) * width + at, count);
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = known ? v[j] : NOT_A_NUMBER;
    store(y + here.row * width + at, v, count);
}

KERNEL token_keys(const void* ids, i64 id_bytes, i64* keys, i64 size, i64 vocabulary) {
    i64 at = first_of_thread<1>();
    if (at >= size) return;
    i64 id = whole_number(ids, id_bytes, at);
    keys[at] = ((id >= 0 && id < vocabulary ? id : vocabulary) << 32) | at;
}

template <class G, int N>
DEVICE void add_to_row(G* dw, i64 token, i64 vocabulary, i64 width, i64 at, const float (&sums)[N]) {
    if (token >= vocabulary) return;
    float v[N];
    load(v, dw + token * width + at, width - at);
#pragma unroll
    for (int j = 0; j < N; j++) v[j] += sums[j];
    store(dw + token * width + at, v, width - at);
}

// Sum the positions of run r. partial (2 runs, width): line 2 r is for a token that began in an earlier run,
// line 2 r + 1 for a token that begins in run r and goes on.
template <class T, class G>
DEVICE void embedding_sums(const i64* keys, const T* dy, G* dw, float* partial, i64 size, i64 width,
                           i64 vocabulary) {
    const int N = Packs<T>::SIZE;
    Place here = place_in_rows<N>(width);
    i64 run = here.row, at = here.column, first = run * RUN, last = first + RUN < size ? first + RUN : size;
    if (at >= width) return;
    float sums[N] = {}, v[N];
    bool came = first > 0 && token_of(keys[first - 1]) == token_of(keys[first]);
    for (i64 i = first; i < last; i++) {
        i64 token = token_of(keys[i]);
        load(v, dy + place_of(keys[i]) * width + at, width - at);
#pragma unroll
        for (int j = 0; j < N; j++) sums[j] += v[j];
        bool goes_on = i + 1 < size && token_of(keys[i + 1]) == token;
        if (goes_on && i + 1 < last) continue;
        if (came || goes_on)
            store(partial + (2 * run + (came ? 0 : 1)) * width + at, sums, width - at);
        else
            add_to_row(dw, token, vocabulary, width, at, sums);
        came = false;
#pragma unroll
        for (int j = 0; j < N; j++) sums[j] = 0.0f;
    }
}

// Add up the partial sums of the token that begins in a run and goes on in later runs.
template <class G>
DEVICE void embedding_joins(const i64* keys, G* dw, const float* partial, i64 size, i64 width,
                            i64 vocabulary) {
    const int N = 4;
    Place here = place_in_rows<N>(width);
    i64 run = here.row, at = here.column, next = (run + 1) * RUN;
    if (at >= width || next >= size) return;
    i64 token = token_of(keys[next - 1]);
    if (token_of(keys[next]) != token) return;
    if (run > 0 && token_of(keys[run * RUN - 1]) == token) return;  // the token began in an earlier run
    float sums[N], v[N];
    load(sums, partial + (2 * run + 1) * width + at, width - at);
    for (; next < size && token_of(keys[next]) == token; next += RUN) {
        load(v, partial + 2 * (next / RUN) * width + at, width - at);
#pragma unroll
        for (int j = 0; j < N; j++) sums[j] += v[j];
    }
    add_to_row(dw, token, vocabulary, width, at, sums);
}

#define PAIRS(T, G)                                                                                          \
    KERNEL embedding_sums_##T##_##G(const i64* keys, const T* dy, G* dw, float* partial, i64 size,           \
                                    i64 width, i64 vocabulary) {                                             \
        embedding_sums<T, G>(keys, dy, dw, partial, size, width, vocabulary);                                \
    }
#define INSTANCES(T)                                                                                         \
    KERNEL embedding_##T(const void* ids, i64 id_bytes, const T* w, T* y, i64 width, i64 vocabulary) {       \
        embedding<T>(ids, id_bytes, w, y, width, vocabulary);                                                \
    }                                                                                                        \
    KERNEL embedding_joins_##T(const i64* keys, T* dw, const float* partial, i64 size, i64 width,            \
                               i64 vocabulary) {                                                             \
        embedding_joins<T>(keys, dw, partial, size, width, vocabulary);                                      \
    }                                                                                                        \
    PAIRS(T, f32)                                                                                            \
    PAIRS(T, bf16)                                                                                           \
    PAIRS(T, f16)

INSTANCES(f32)
INSTANCES(bf16)
INSTANCES(f16)
