// DGC's momentum correction and momentum factor masking. Formulas: espresso/compressors/momentum.py, and its host twin.
//
// `advance` makes one pass: it reads gradient and old velocity and writes the new one (and what is added to the
// residual, where that is another array). `mask` touches only what was sent. Sums round as the host's do.

#include "common.cuh"
#include "slots.cuh"

// One stretch. espresso.compressors.cuda.momentum writes it: keep both in step.
struct Stretch {
    i64 numel;
    i64 source;    // first element of the gradient
    i64 velocity;  // of both velocity buffers
    i64 out;       // of what is added
};

template <typename T>
__device__ void advance(
    const Stretch* stretches, const Tile* tiles, i64 tile, const T* source, T scale, T momentum, int nesterov,
    const T* old, T* fresh, T* out
) {
    const Tile mine = tiles[blockIdx.x];
    const Stretch stretch = stretches[mine.segment];
    const i64 high = least(mine.low + tile, stretch.numel);
    const T* gradient = source + stretch.source;
    const T* before = old + stretch.velocity;
    T* after = fresh + stretch.velocity;
    T* added = out ? out + stretch.out : 0;
#pragma unroll 4
    for (i64 i = mine.low + threadIdx.x; i < high; i += THREADS) {
        const T g = gradient[i] * scale;
        const T m = nesterov ? (before[i] + g) * momentum : before[i] * momentum + g;
        after[i] = m;
        if (added) added[i] = nesterov ? m + g : m;
    }
}

// What a sparsifier has sent of one segment.
struct Sent {
    i64 numel;
    i64 offset;    // of the body, in bytes from the payload's beginning
    i64 slots;     // k
    i64 velocity;  // first element of both velocity buffers
};

// Tiles are of slots. A payload that is not finite holds anything: nobody will commit the velocities.
template <typename T>
__device__ void mask(const Sent* segments, const Tile* tiles, i64 tile, const u8* payload, T* fresh) {
    if (payload[FLAGS_AT] & 1) return;
    const Tile mine = tiles[blockIdx.x];
    const Sent sent = segments[mine.segment];
    const u8* body = payload + sent.offset;
    const i64 count = least((i64)*(const u32*)body, sent.slots);
    const u32* ends = (const u32*)(body + ends_at(sent.slots, sizeof(T)));
    const u16* places = (const u16*)(body + places_at(sent.numel, sent.slots, sizeof(T)));
    const i64 high = least(mine.low + tile, count), num = num_ends(sent.numel);
    i64 span = 0;
    for (i64 slot = mine.low + threadIdx.x; slot < high; slot += THREADS) {
        span = span_of(ends, num, slot, span);
        const i64 index = span * SPAN + places[slot];
        if (index < sent.numel) fresh[sent.velocity + index] = T(0);
    }
}

#define ADVANCE_PARAMETERS(T)                                                                                  \
    const Stretch *stretches, const Tile *tiles, i64 tile, const T *source, T scale, T momentum, int nesterov, \
        const T *old, T *fresh, T *out
#define ADVANCE(T) advance<T>(stretches, tiles, tile, source, scale, momentum, nesterov, old, fresh, out)
#define MASK_PARAMETERS(T) const Sent *segments, const Tile *tiles, i64 tile, const u8 *payload, T *fresh

KERNEL(advance_f32, THREADS, (ADVANCE_PARAMETERS(float)), ADVANCE(float))
KERNEL(advance_f64, THREADS, (ADVANCE_PARAMETERS(double)), ADVANCE(double))
KERNEL(mask_f32, THREADS, (MASK_PARAMETERS(float)), mask<float>(segments, tiles, tile, payload, fresh))
KERNEL(mask_f64, THREADS, (MASK_PARAMETERS(double)), mask<double>(segments, tiles, tile, payload, fresh))
