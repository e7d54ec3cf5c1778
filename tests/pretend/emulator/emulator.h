// Emulator of CUDA's language on a CPU, for tests: declarations for kernels, and the threads of a block.
//
// Blocks run one after the other. A thread of a block is a context with its own stack; it runs until it ends
// or waits for its warp (at a shuffle) or its block (at a barrier). A seed determines the order of threads:
// one warp may be far ahead of the others, and lanes of a warp run in any order. A read without a barrier
// therefore mostly comes too early, and shared memory begins as NaN. A launch ends with a message if the
// behaviour of a GPU would be undefined: some threads do not reach a barrier, lanes are missing at a shuffle,
// or threads wait at barriers on different lines.
#pragma once
#define EMULATED
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <math.h>
#include <mutex>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__
#define __restrict__ __restrict
#define __launch_bounds__(...)

struct Dimensions {
    volatile unsigned x, y, z;
};
static Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

const int WARP = 32;
const size_t STACK = 96 << 10, MOST_SHARED = 48 << 10;
enum State { FRESH, READY, AT_WARP, AT_BARRIER, DONE };

struct Fiber {
    jmp_buf at;
    ucontext_t first;
    char* stack;
    bool started;
};

struct Thread {
    State state;
    Fiber* fiber;
    const char* file;
    int line;
    unsigned parity;  // buffer of its next shuffle; slower lanes may still read the other buffer
};

struct Launch {  // arguments from raw.py
    unsigned grid[3], block[3];
    uint64_t shared, seed;
    char message[512];
};

typedef void (*Body)(void*);

static struct {
    std::vector<Thread> threads;
    std::vector<Fiber*> free, all;
    std::vector<std::pair<void*, size_t>> shared;
    std::vector<uint64_t> exchange[2];
    std::vector<char> dynamic;
    jmp_buf scheduler;
    int current;
    Body body;
    void* arguments;
    std::string error;
    uint64_t random;
} now;

static uint64_t draw() {
    now.random ^= now.random << 13;
    now.random ^= now.random >> 7;
    return now.random ^= now.random << 17;
}

template <class T>
static void shuffle_order(std::vector<T>& items) {
    for (size_t n = items.size(); n > 1; n--) std::swap(items[n - 1], items[draw() % n]);
}

static void fail(const std::string& text) {
    if (now.error.empty()) now.error = text;
}

__attribute__((noinline)) static void give_way(State state, const char* file, int line) {
    Thread& mine = now.threads[now.current];
    mine.state = state, mine.file = file, mine.line = line;
    Fiber* fiber = mine.fiber;
    if (!_setjmp(fiber->at)) _longjmp(now.scheduler, 1);
}

static void work() {  // a fiber never ends: it runs one thread after the other
    for (;;) {
        now.body(now.arguments);
        give_way(DONE, "", 0);
    }
}

static Fiber* spare_fiber() {
    if (now.free.empty()) {
        Fiber* fiber = new Fiber();
        fiber->stack = (char*)malloc(STACK);
        now.all.push_back(fiber);
        now.free.push_back(fiber);
    }
    Fiber* fiber = now.free.back();
    now.free.pop_back();
    return fiber;
}

__attribute__((noinline)) static void enter(Fiber* fiber) {
    if (_setjmp(now.scheduler)) return;
    if (fiber->started) _longjmp(fiber->at, 1);
    fiber->started = true;
    getcontext(&fiber->first);
    fiber->first.uc_stack.ss_sp = fiber->stack;
    fiber->first.uc_stack.ss_size = STACK;
    fiber->first.uc_link = nullptr;
    makecontext(&fiber->first, work, 0);
    setcontext(&fiber->first);
}

static void resume(int number) {
    Thread& thread = now.threads[number];
    if (thread.state == FRESH) thread.fiber = spare_fiber();
    now.current = number;
    unsigned x = blockDim.x, y = blockDim.y;
    threadIdx.x = number % x, threadIdx.y = number / x % y, threadIdx.z = number / x / y;
    enter(thread.fiber);
    if (thread.state == DONE) now.free.push_back(thread.fiber);
}

static std::string place(const Thread& thread) {
    static const char* names[] = {"not begun", "running", "at a shuffle", "at a barrier", "ended"};
    std::string text = names[thread.state];
    return thread.line ? text + " in " + thread.file + " line " + std::to_string(thread.line) : text;
}

// Make the threads [first, last) ready if all of them wait at the same line; otherwise fail with the reason.
static bool release(int first, int last, State state) {
    int one = first;
    while (one + 1 < last && now.threads[one].state != state) one++;
    const Thread& waits = now.threads[one];
    for (int number = first; number < last; number++) {
        const Thread& other = now.threads[number];
        if (other.state == state && other.line == waits.line && other.file == waits.file) continue;
        fail("threads " + std::to_string(one) + " and " + std::to_string(number) +
             " of a block diverge: " + place(waits) + ", " + place(other));
        return false;
    }
    for (int number = first; number < last; number++)
        now.threads[number].state = READY, now.threads[number].line = 0;
    return true;
}

static int ended(int first, int last) {
    int count = 0;
    for (int number = first; number < last; number++) count += now.threads[number].state == DONE;
    return count;
}

// Run a warp until all its lanes have ended or wait for the block.
static bool run_warp(int first, int last) {
    std::vector<int> lanes;
    bool ran = false;
    for (;;) {
        lanes.clear();
        bool at_warp = false;
        for (int number = first; number < last; number++) {
            if (now.threads[number].state <= READY) lanes.push_back(number);
            at_warp |= now.threads[number].state == AT_WARP;
        }
        if (lanes.empty() && at_warp) {
            if (last - first < WARP) fail("a shuffle in a warp of less than 32 threads");
            if (!now.error.empty() || !release(first, last, AT_WARP)) return ran;
            continue;
        }
        if (lanes.empty()) return ran;
        ran = true;
        shuffle_order(lanes);
        for (int number : lanes) {
            resume(number);
            if (!now.error.empty()) return ran;
        }
    }
}

static void run_block() {
    int size = blockDim.x * blockDim.y * blockDim.z;
    now.threads.assign(size, Thread{FRESH, nullptr, "", 0, 0});
    now.shared.clear();
    memset(now.dynamic.data(), 0xff, now.dynamic.size());
    std::vector<int> warps;
    for (int first = 0; first < size; first += WARP) warps.push_back(first);
    while (now.error.empty() && ended(0, size) < size) {
        shuffle_order(warps);
        for (int first : warps) {
            run_warp(first, first + WARP < size ? first + WARP : size);
            if (!now.error.empty()) return;
        }
        if (ended(0, size) < size) release(0, size, AT_BARRIER);
    }
}

static void forget_fibers() {  // some fibers are in the middle of a failed kernel
    now.free = now.all;
    for (Fiber* fiber : now.all) fiber->started = false;
}

static int run(Launch* launch, Body body, void* arguments) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> guard(one_at_a_time);
    now.error.clear();
    now.random = launch->seed * 2654435761u + 88172645463325252ull;
    now.body = body, now.arguments = arguments;
    gridDim.x = launch->grid[0], gridDim.y = launch->grid[1], gridDim.z = launch->grid[2];
    blockDim.x = launch->block[0], blockDim.y = launch->block[1], blockDim.z = launch->block[2];
    int size = blockDim.x * blockDim.y * blockDim.z;
    for (auto& side : now.exchange) side.assign(size, 0);
    now.dynamic.assign(launch->shared, 0);
    uint64_t blocks = (uint64_t)gridDim.x * gridDim.y * gridDim.z;
    for (uint64_t block = 0; block < blocks && now.error.empty(); block++) {
        blockIdx.x = block % gridDim.x, blockIdx.y = block / gridDim.x % gridDim.y;
        blockIdx.z = block / gridDim.x / gridDim.y;
        run_block();
    }
    if (now.error.empty()) return 0;
    forget_fibers();
    snprintf(launch->message, sizeof launch->message, "%s (block %u)", now.error.c_str(),
             (unsigned)blockIdx.x);
    return 1;
}

// --------------------------------------------------------------------------- functions for kernels

static void stop(const std::string& text) {
    fail(text);
    give_way(DONE, "", 0);  // the thread is not resumed
}

// Fill a shared variable with NaN when a block first reaches it.
static void begin_shared(void* memory, size_t size) {
    size_t total = now.dynamic.size() + size;
    for (auto& seen : now.shared) {
        if (seen.first == memory) return;
        total += seen.second;
    }
    if (total > MOST_SHARED) stop("a block uses " + std::to_string(total) + " bytes of shared memory");
    now.shared.push_back({memory, size});
    memset(memory, 0xff, size);
}

static int lane() { return now.current % WARP; }

template <class T>
static T shuffled(unsigned mask, T value, int source, const char* file, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
    if (mask != 0xffffffffu) stop("shuffles of part of a warp are not emulated");
    int number = now.current, parity = now.threads[number].parity++ & 1;
    memcpy(&now.exchange[parity][number], &value, sizeof value);
    give_way(AT_WARP, file, line);
    T found;
    memcpy(&found, &now.exchange[parity][number - number % WARP + source % WARP], sizeof found);
    return found;
}

// ------------------------------------------------------------------------------- kernels by name

template <class P>
struct Kind {
    static const char letter = '?';
};
template <class P>
struct Kind<P*> {
    static const char letter = 'P';
};
template <>
struct Kind<long long> {
    static const char letter = 'L';
};
template <>
struct Kind<int> {
    static const char letter = 'I';
};
template <>
struct Kind<unsigned> {
    static const char letter = 'U';
};
template <>
struct Kind<float> {
    static const char letter = 'F';
};
template <>
struct Kind<double> {
    static const char letter = 'D';
};

template <class... P>
static std::string kinds(void (*)(P...)) {
    return {Kind<P>::letter...};
}

template <class... P, size_t... I>
static void apply(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*(P*)arguments[I]...);
}
template <class... P>
static void apply(void (*kernel)(P...), void** arguments) {
    apply(kernel, arguments, std::index_sequence_for<P...>());
}

}  // namespace emulator

#define EMULATE(name)                                                                                        \
    extern "C" const char* kinds_of_##name() {                                                               \
        static const std::string kinds = emulator::kinds(&name);                                             \
        return kinds.c_str();                                                                                \
    }                                                                                                        \
    extern "C" int emulate_##name(emulator::Launch* launch, void** arguments) {                              \
        return emulator::run(launch, [](void* given) { emulator::apply(&name, (void**)given); }, arguments); \
    }

#define __syncthreads() emulator::give_way(emulator::AT_BARRIER, __FILE__, __LINE__)
#define __syncwarp(...) (void)emulator::shuffled(0xffffffffu, 0, 0, __FILE__, __LINE__)
#define __shfl_sync(mask, value, source) emulator::shuffled(mask, value, source, __FILE__, __LINE__)
#define __shfl_xor_sync(mask, value, way)                                                                    \
    emulator::shuffled(mask, value, emulator::lane() ^ (way), __FILE__, __LINE__)
#define __shfl_down_sync(mask, value, way)                                                                   \
    emulator::shuffled(mask, value,                                                                          \
                       emulator::lane() + (way) < 32 ? emulator::lane() + (way) : emulator::lane(),          \
                       __FILE__, __LINE__)

// ------------------------------------------------------------------------------- numbers

static inline int __float_as_int(float x) {
    int y;
    memcpy(&y, &x, 4);
    return y;
}
static inline float __int_as_float(int x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
static inline unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
static inline float __uint_as_float(unsigned x) { return __int_as_float((int)x); }
#define __expf expf  // glibc has another function of this name
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dsub_rn(double x, double y) { return x - y; }
static inline double __dmul_rn(double x, double y) { return x * y; }

static inline unsigned short half_bits_of_float(float value) {  // nearest, ties to even
    unsigned x = __float_as_uint(value), sign = x >> 16 & 0x8000u;
    x &= 0x7fffffffu;
    if (x > 0x7f800000u) return 0x7fff;
    if (x >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    if (x < 0x38800000u)
        return (unsigned short)(sign | (unsigned)nearbyintf(__uint_as_float(x) * 16777216.0f));
    x += 0xfffu + (x >> 13 & 1u);
    return (unsigned short)(sign | (x - 0x38000000u) >> 13);
}

static inline float float_of_half_bits(unsigned short bits) {
    unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0)
        return __uint_as_float(sign | __float_as_uint((float)fraction * 5.9604644775390625e-8f));
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}
