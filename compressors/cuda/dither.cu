// What numbers are moved by before they are rounded. Formulas and twin: espresso/cpu_offload/dither.py.

#include "common.cuh"

__device__ inline u32 drawn(u32 key, i64 element) {
    u32 x = (u32)element * 0x9E3779B1u ^ key;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// A warp takes a block, or 256 numbers of a cast, which has `block` 0 and drops the last `spare` bits.
template <typename T>
__device__ void dither_tile(
    const Row* rows, const Tile* tiles, i64 tile, T* source, int block, T levels, int spare, u64 salt
) {
    typedef typename Number<T>::Bits Bits;
    const Tile mine = tiles[blockIdx.x];
    const Row row = rows[mine.segment];
    const u32 key = (u32)mix64(mix64(salt ^ (u64)row.hash) + (u64)row.start);
    const i64 high = least(mine.low + tile, row.numel);
    const int lane = threadIdx.x % 32, size = block ? block : 256;
    T* numbers = source + row.source;
    for (i64 low = mine.low + threadIdx.x / 32 * size; low < high; low += WARPS * size) {
        const i64 end = least(low + size, high);
        Bits top = 0;
        if (block) {
            for (i64 i = low + lane; i < end; i += 32) top = largest(top, magnitude_of(numbers[i]));
            for (int distance = 16; distance; distance /= 2)
                top = largest(top, __shfl_xor_sync(FULL, top, distance));
            if (top >= Number<T>::infinity) continue;
        }
        const T step = number_of(top) / levels * T(2.3283064365386963e-10);  // 2^-32
        for (i64 i = low + lane; i < end; i += 32) {
            const u32 random = drawn(key, i);
            if (block) {
                if (magnitude_of(numbers[i]) != top) numbers[i] += (T)(int)random * step;
            } else if (is_finite(numbers[i])) {
                const Bits added = spare < 32 ? (Bits)(random >> (32 - spare)) : (Bits)random << (spare - 32);
                numbers[i] = number_of((Bits)((bits_of(numbers[i]) + added) & ~(((Bits)1 << spare) - 1)));
            }
        }
    }
}

#define DITHER_PARAMETERS(T) \
    const Row *rows, const Tile *tiles, i64 tile, T *source, int block, T levels, int spare, u64 salt
#define DITHER rows, tiles, tile, source, block, levels, spare, salt

KERNEL(dither_f32, THREADS, (DITHER_PARAMETERS(float)), dither_tile(DITHER))
KERNEL(dither_f64, THREADS, (DITHER_PARAMETERS(double)), dither_tile(DITHER))
