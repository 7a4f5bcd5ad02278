// Sparse ternary: signs and places of what candidates.cuh finds. Format: espresso/compressors/ternary.py; twin:
// espresso/cpu_offload/ternary.py.

#include "common.cuh"
#include "selection.cuh"

#define TILE 4096  // elements that share a mean
#include "candidates.cuh"

#define MOST_BITS 7  // of a place in a group
#define HELD (8192 / sizeof(T))  // numbers of a tile that stay in shared memory; those behind are read again

// In bytes from the body's beginning; means come at 8.
__device__ inline i64 num_means(i64 numel) { return (numel + TILE - 1) / TILE; }
__device__ inline i64 ends_at(i64 numel, i64 itemsize) { return 8 + itemsize * num_means(numel); }
__device__ inline i64 uppers_at(i64 numel, i64 itemsize) {
    return ends_at(numel, itemsize) + 4 * (num_means(numel) - 1);
}

// In words, of uppers and of the lowers behind them. `before`: slots of the tiles before a tile.
__device__ inline int place_bits(i64 numel, i64 k) {
    int bits = 0;
    while (bits < MOST_BITS && k << (bits + 1) < numel) ++bits;
    return bits;
}
__device__ inline i64 num_uppers(i64 numel, i64 k, int bits) {
    return k / 32 + num_means(numel) + (((numel + (1 << bits) - 1) >> bits) + 31) / 32;
}
__device__ inline i64 num_lowers(i64 numel, i64 k, int bits) { return k * (bits + 1) / 32 + num_means(numel); }
__device__ inline i64 first_upper(i64 before, i64 tile, int bits) {
    return before / 32 + tile * ((TILE >> bits) / 32 + 1);
}
__device__ inline i64 first_lower(i64 before, i64 tile, int bits) { return before * (bits + 1) / 32 + tile; }

template <typename T> struct Ternary {
    typedef typename Number<T>::Bits Bits;
    const Encode<T>& call;
    const Row& row;
    i64 low, high, begin;
    u16* places;  // in the tile, of what is sent
    T* values;    // the first HELD of it

    __device__ Ternary(const Encode<T>& call_, const Row& row_, i64 low_, i64 high_, i64 begin_)
        : call(call_), row(row_), low(low_), high(high_), begin(begin_) {
        __shared__ u16 room[TILE];
        __shared__ T held[HELD];
        places = room;
        values = held;
    }

    __device__ void put(i64 slot, u32 i, Bits bits) const {
        const u32 nth = (u32)(slot - begin);
        places[nth] = (u16)(i - low);
        if (nth < HELD) values[nth] = number_of(bits);
    }

    __device__ T q(u32 nth) const { return nth < HELD ? values[nth] : call.q(row, low + places[nth]); }
    __device__ double part(u32 nth) const { return (double)number_of(magnitude_of(q(nth))) * (1.0 / TILE); }

    __device__ void done(i64 end) const {
        __shared__ T shared_mean;
        __shared__ u32 uppers[2 * TILE / 32];
        __shared__ u32 lowers[(MOST_BITS + 1) * TILE / 32];
        const u32 num = (u32)(end - begin);
        const int bits = place_bits(row.numel, row.count);
        const i64 tile = low / TILE;
        const bool is_last = high == row.numel;
        const i64 upper = first_upper(begin, tile, bits), lower = first_lower(begin, tile, bits);
        const i64 all_uppers = num_uppers(row.numel, row.count, bits);
        const i64 num_upper = (is_last ? all_uppers : first_upper(end, tile + 1, bits)) - upper;
        const i64 num_lower =
            (is_last ? num_lowers(row.numel, row.count, bits) : first_lower(end, tile + 1, bits)) - lower;
        __syncthreads();
        for (int word = threadIdx.x; word < 2 * TILE / 32; word += blockDim.x) uppers[word] = 0;
        for (int word = threadIdx.x; word < (MOST_BITS + 1) * TILE / 32; word += blockDim.x) lowers[word] = 0;
        if (threadIdx.x < 32) {  // 64 lanes, two a thread
            double even = 0, odd = 0;
            for (u32 nth = threadIdx.x; nth < num; nth += 64) {
                even += part(nth);
                if (nth + 32 < num) odd += part(nth + 32);
            }
            double sum = even + odd;
            for (int distance = 16; distance; distance /= 2) sum += __shfl_down_sync(FULL, sum, distance);
            if (threadIdx.x == 0) shared_mean = num ? T(sum / (double)num * TILE) : T(0);
        }
        __syncthreads();
        const T mean = shared_mean;
        for (u32 nth = threadIdx.x; nth < num; nth += blockDim.x) {
            const u32 place = places[nth], bit = nth + (place >> bits), at = nth * (bits + 1);
            const T value = q(nth);
            const bool negative = value < T(0);
            const u64 slot = (u64)(place & ((1u << bits) - 1) | (negative ? 1u << bits : 0)) << at % 32;
            atomicOr(&uppers[bit / 32], 1u << bit % 32);
            atomicOr(&lowers[at / 32], (u32)slot);
            if (slot >> 32) atomicOr(&lowers[at / 32 + 1], (u32)(slot >> 32));
            call.keep(row, low + place, value - (negative ? -mean : mean));
        }
        __syncthreads();
        u32* body = call.template body<u32>(row, uppers_at(row.numel, sizeof(T)));
        for (i64 word = threadIdx.x; word < num_upper; word += blockDim.x)  // behind the last tile's all are zero
            body[upper + word] = word < 2 * TILE / 32 ? uppers[word] : 0;
        for (i64 word = threadIdx.x; word < num_lower; word += blockDim.x)
            body[all_uppers + lower + word] = word < (MOST_BITS + 1) * TILE / 32 ? lowers[word] : 0;
        if (threadIdx.x == 0) {
            call.template body<T>(row, 8)[tile] = mean;
            if (!is_last) call.template body<u32>(row, ends_at(row.numel, sizeof(T)))[tile] = (u32)end;
        }
    }

    __device__ void close(i64 sent) const {
        if (threadIdx.x == 0) {
            u32* prefix = call.template body<u32>(row);
            prefix[0] = (u32)sent;
            prefix[1] = 0;
        }
    }
};

// A tile is summed in shared memory: rows in order, a thread for each word of a row's uppers. Ends, groups, places and
// means are all checked; one tile's end is where the next begins, so that a row passes only if all of it is good.
struct TernaryScatter {
    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        __shared__ T total[TILE];
        const i64 tile = low / TILE, itemsize = sizeof(T), size = high - low;
        const int bits = place_bits(row.numel, row.count);
        const u32 groups = (u32)((size + (1 << bits) - 1) >> bits);
        for (int i = threadIdx.x; i < TILE; i += blockDim.x) total[i] = T(0);
        for (i64 source = 0; source < call.num_rows; ++source) {
            const u32* prefix = call.template body<u32>(source, row);
            const u32* ends = call.template body<u32>(source, row, ends_at(row.numel, itemsize));
            const T mean = call.template body<T>(source, row, 8)[tile];
            const i64 begin = tile > 0 ? (i64)ends[tile - 1] : 0;
            const i64 stop = high < row.numel ? (i64)ends[tile] : (i64)prefix[0];
            const bool fits = prefix[0] <= row.count && prefix[1] == 0 && begin <= stop && stop <= (i64)prefix[0] &&
                              mean >= T(0) && is_finite(mean);
            const i64 num = fits ? stop - begin : 0;
            const u32* body = call.template body<u32>(source, row, uppers_at(row.numel, itemsize));
            const u32* uppers = body + first_upper(begin, tile, bits);  // at most a word for every thread
            const u32* lowers = body + num_uppers(row.numel, row.count, bits) + first_lower(begin, tile, bits);
            const u32 word = fits && 32 * threadIdx.x < num + groups ? uppers[threadIdx.x] : 0;
            i64 slot, found, none;
            block_scan((u32)__popc(word), 0, &slot, &none, &found, &none);
            if (!fits || found != num) {
                if (threadIdx.x == 0) call.malformed(source, segment);
                continue;
            }
            const auto lower = [&](i64 nth) {
                const i64 at = nth * (bits + 1);
                const u32 behind = at % 32 + bits >= 32 ? lowers[at / 32 + 1] : 0;
                return (u32)(((u64)behind << 32 | lowers[at / 32]) >> at % 32);
            };
            const u32 mask = (1u << bits) - 1;
            // Slots of one group are neighbours.
            i64 previous = word & 1 && slot && uppers[threadIdx.x - 1] >> 31
                               ? (32 * threadIdx.x - slot) << bits | lower(slot - 1) & mask
                               : -1;
            for (u32 rest = word; rest; rest &= rest - 1, ++slot) {
                const i64 group = 32 * threadIdx.x + __ffs((int)rest) - 1 - slot;
                const u32 mine = lower(slot);
                const i64 at = group << bits | mine & mask;
                if (at <= previous || at >= size)
                    call.malformed(source, segment);
                else
                    total[at] += mine >> bits & 1 ? -mean : mean;
                previous = at;
            }
        }
        __syncthreads();
        for (i64 i = low + threadIdx.x; i < high; i += blockDim.x)
            call.target[row.source + i] = call.scale == T(1) ? total[i - low] : total[i - low] * call.scale;
    }
};

SPARSE_KERNELS(float, f32, Ternary, TernaryScatter)
SPARSE_KERNELS(double, f64, Ternary, TernaryScatter)
