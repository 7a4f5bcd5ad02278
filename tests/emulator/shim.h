// Runs the CUDA sources on the host: a test tool that emulates their semantics, not a GPU and not its speed.
//
// The threads of a block are fibers on one operating-system thread; they take turns at barriers and warp collectives
// only, so a missing barrier shows as soon as threads run in another order (`order`: forward, backward, shuffled).
// Blocks run one after the other, in the same three orders. Shared memory is static and keeps what the block before
// left in it, as on a device. A collective that not all 32 threads of a warp reach, or a barrier that nobody can
// release any more, ends the process with a message.

#pragma once
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define KERNEL(name, threads, parameters, body) \
    extern "C" void name parameters { emulator::run([&] { body; }, threads); }
#define SMALL_KERNEL(name, parameters, body) KERNEL(name, THREADS, parameters, body)

// Compiled a second time, the sources tell races.cpp of every access; the emulation's own are none of its business.
#ifdef EMULATOR_RACES
extern "C" {
void races_launch();
void races_block(int block, int threads);
void races_thread(int thread);
void races_pause();
void races_barrier();
void races_syncwarp();
void races_fence();
void races_atomic(void* at, size_t size);
}
#define OWN __attribute__((no_sanitize("thread")))
#define TELL(call) call
#else
#define OWN
#define TELL(call)
#endif
#define STATE static __attribute__((section("emulator_state")))  // not where shared variables lie

struct Place {
    unsigned x;
};
STATE Place threadIdx;
STATE Place blockIdx;
STATE Place blockDim;
STATE Place gridDim;

namespace emulator {

const size_t STACK_BYTES = 64 * 1024;

struct Warp {
    int arrived = 0, alive = 0;
    unsigned generation = 0;
    uint64_t values[2][32];
};

struct Fiber {
    ucontext_t context;  // where it begins, once
    jmp_buf here;        // where it goes on: without the system call for the signal mask that swapcontext makes
    std::vector<char> stack;
    bool done;
};

STATE std::vector<Fiber> fibers;
STATE std::vector<Warp> warps;
STATE jmp_buf scheduler;
STATE std::function<void()> body;
STATE int current = 0;
STATE int alive = 0;
STATE int arrived = 0;
STATE int gathered = 0;
STATE int results[2] = {0, 0};
STATE unsigned generation = 0;
STATE uint64_t progress = 0;
STATE int order = 0;

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "emulated kernel: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
    abort();
}

OWN inline void yield() {
    int mine = current;
    TELL(races_pause());
    if (!_setjmp(fibers[mine].here)) _longjmp(scheduler, 1);
    current = mine;
    threadIdx.x = mine;
    TELL(races_thread(mine));
}

OWN inline void release_block() {
    TELL(races_barrier());
    results[generation & 1] = gathered;
    gathered = 0;
    arrived = 0;
    ++generation;
    ++progress;
}

OWN inline int barrier(int flag) {
    unsigned mine = generation;
    gathered |= flag != 0;
    if (++arrived == alive)
        release_block();
    else
        while (generation == mine) yield();
    return results[mine & 1];
}

// Every lane's value, once all lanes of the warp have come.
OWN inline const uint64_t* exchange(uint64_t value) {
    Warp& warp = warps[threadIdx.x / 32];
    unsigned mine = warp.generation;
    if (warp.alive != 32) fail("a warp collective that not all 32 threads reach");
    warp.values[mine & 1][threadIdx.x % 32] = value;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.generation;
        ++progress;
    } else {
        while (warp.generation == mine) yield();
    }
    return warp.values[mine & 1];
}

// A fiber runs one thread of every block; between two it waits where the last one ended.
OWN inline void entry() {
    for (;;) {
        TELL(races_thread(current));
        body();
        TELL(races_pause());
        Fiber& fiber = fibers[current];
        fiber.done = true;
        ++progress;
        Warp& warp = warps[threadIdx.x / 32];
        --warp.alive;
        if (warp.arrived) fail("a thread ended while others of its warp wait in a collective");
        if (--alive && arrived == alive) release_block();
        if (!_setjmp(fiber.here)) _longjmp(scheduler, 1);
    }
}

OWN inline void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (!fiber.stack.empty()) _longjmp(fiber.here, 1);
    fiber.stack.resize(STACK_BYTES);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, entry, 0);
    setcontext(&fiber.context);
}

// The n-th of `count` in the chosen order.
OWN inline int turn(int n, int count) {
    if (order == 0) return n;
    if (order == 1) return count - 1 - n;
    int step = 7919;  // a prime, so that every one comes once
    while (count % step == 0) step += 2;
    return (int)(((int64_t)n * step + order) % count);
}

OWN inline void run_block() {
    int count = (int)blockDim.x;
    TELL(races_block((int)blockIdx.x, count));
    warps.assign((count + 31) / 32, Warp());
    alive = count;
    arrived = gathered = 0;
    for (int i = 0; i < count; ++i) {
        ++warps[i / 32].alive;
        fibers[i].done = false;
    }
    while (alive) {
        uint64_t before = progress;
        for (int n = 0; n < count; ++n) {
            current = turn(n, count);
            if (fibers[current].done) continue;
            threadIdx.x = current;
            resume(fibers[current]);
        }
        if (progress == before) fail("all threads wait: a barrier in divergent code");
    }
}

STATE unsigned grid = 0;
STATE unsigned threads = 0;

template <typename Body> OWN void run(const Body& kernel, unsigned bound) {
    if (threads > bound) fail("more threads than the kernel's launch bound");
    if (fibers.size() < threads) fibers.resize(threads);
    body = kernel;
    TELL(races_launch());
    gridDim.x = grid;
    blockDim.x = threads;
    for (unsigned n = 0; n < grid; ++n) {
        blockIdx.x = turn(n, grid);
        run_block();
    }
}

template <typename A> uint64_t pack(A value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(A));
    return bits;
}

template <typename A> A unpack(uint64_t bits) {
    A value;
    memcpy(&value, &bits, sizeof(A));
    return value;
}

}  // namespace emulator

extern "C" OWN void emulator_configure(unsigned grid, unsigned threads, int order) {
    emulator::grid = grid;
    emulator::threads = threads;
    emulator::order = order;
}

inline void __syncthreads() { emulator::barrier(0); }
inline int __syncthreads_or(int flag) { return emulator::barrier(flag); }
OWN inline void __syncwarp() {
    emulator::exchange(0);
    TELL(races_syncwarp());
}
inline void __threadfence() { TELL(races_fence()); }

inline unsigned __ballot_sync(unsigned, int flag) {
    const uint64_t* all = emulator::exchange(flag != 0);
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= (unsigned)all[lane] << lane;
    return mask;
}
template <typename A> A __shfl_sync(unsigned, A value, int lane) {
    return emulator::unpack<A>(emulator::exchange(emulator::pack(value))[lane]);
}
template <typename A> A __shfl_xor_sync(unsigned, A value, int distance) {
    int lane = (threadIdx.x % 32) ^ distance;
    return emulator::unpack<A>(emulator::exchange(emulator::pack(value))[lane]);
}
template <typename A> A __shfl_down_sync(unsigned, A value, int distance) {
    int lane = threadIdx.x % 32 + distance;
    const uint64_t* all = emulator::exchange(emulator::pack(value));
    return lane < 32 ? emulator::unpack<A>(all[lane]) : value;
}
template <typename A> A __shfl_up_sync(unsigned, A value, int distance) {
    int lane = (int)(threadIdx.x % 32) - distance;
    const uint64_t* all = emulator::exchange(emulator::pack(value));
    return lane >= 0 ? emulator::unpack<A>(all[lane]) : value;
}

template <typename A> OWN A atomicAdd(A* at, A value) {
    TELL(races_atomic(at, sizeof(A)));
    A old = *at;
    *at = old + value;
    return old;
}
template <typename A> OWN A atomicOr(A* at, A value) {
    TELL(races_atomic(at, sizeof(A)));
    A old = *at;
    *at = old | value;
    return old;
}
template <typename A> OWN A atomicMax(A* at, A value) {
    TELL(races_atomic(at, sizeof(A)));
    A old = *at;
    if (old < value) *at = value;
    return old;
}

inline unsigned __float_as_uint(float value) { return emulator::unpack<unsigned>(emulator::pack(value)); }
inline float __uint_as_float(unsigned bits) { return emulator::unpack<float>(bits); }
inline long long __double_as_longlong(double value) {
    return emulator::unpack<long long>(emulator::pack(value));
}
inline double __longlong_as_double(long long bits) { return emulator::unpack<double>((uint64_t)bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz((unsigned)bits) : 32; }
inline int __clzll(long long bits) { return bits ? __builtin_clzll((unsigned long long)bits) : 64; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
