// Scaled sign, onebit, twobit. Format: espresso/compressors/signs.py; twins: espresso/cpu_offload/signs.py, twobit.py.
//
// Means per block: one pass, a warp a block. Sums have the host's shape: 64 lanes in the numbers' type (lane = element
// mod 64, of which a thread holds two), added in float64 by halving. With blocks of 256 q stays in registers; other
// sizes read the block twice (twobit three times), from the second time on from the caches.
//
// One mean per segment (block 0): sum, scale and sign are three launches and two passes. Its sum: 128 lanes over blocks
// of 4096 elements, the blocks of a chunk of 65536 in order, then the chunks in order.

#include "common.cuh"

#define LANES 128
#define SUM_BLOCK 4096
#define CHUNK 65536

template <typename T> __device__ inline T absolute(T value) { return number_of(magnitude_of(value)); }

template <typename T> struct SignReader {
    struct Loaded {
        T plus, minus;
        u32 word;
    };
    static const int each = 4, at_once = Number<T>::at_once / 4;
    const Decode<T>& call;
    const Row& row;
    i64 segment;
    i64 low;
    int means;
    BlockOf index_of;

    __device__ Loaded load(const u8* body, int at) const {
        const T* values = (const T*)body + index_of.first * means + index_of(at) * means;
        const u32* words = (const u32*)(body + means * row.count * (i64)sizeof(T)) + low / 32;
        return {values[0], means == 2 ? values[1] : -values[0], words[at / 32]};
    }
    __device__ bool values(const Loaded& loaded, int at, T* value) const {
        const T plus = loaded.plus, minus = loaded.minus;
#pragma unroll
        for (int k = 0; k < 4; ++k) value[k] = loaded.word >> (at % 32) & 1u << k ? minus : plus;
        return !is_scale(plus) | !is_scale(-minus);
    }
    __device__ void complain(i64 source) const { call.malformed(source, segment); }
};

struct Signs : Plain {
    int block;  // 0: the segment's one mean is in the body already
    int means;  // of a block: 1, or 2, that of numbers not negative first

    __device__ Signs(int block_, int means_) : block(block_), means(means_) {}

    template <typename T> __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        bool bad = false;
        if (block) {
            for (i64 first = low + (i64)(threadIdx.x / 32) * block; first < high; first += (i64)WARPS * block) {
                const int num = (int)least((i64)block, row.numel - first);
                bool wrong = num == 256 && block == 256 ? encode_block<8>(call, row, first, num)
                                                        : encode_block<0>(call, row, first, num);
                bad = bad || wrong;
            }
        } else {
            const T size = *call.template body<T>(row);
            const int rows = (int)((high - low + 31) / 32);
            for (int part = threadIdx.x / 32; part < rows; part += WARPS)
                sign_row(call, row, low + 32 * part, high, size, -size, call.template body<u32>(row, sizeof(T)));
        }
        return bad;
    }

    // Sign word and residual of up to 32 elements from `first`.
    template <typename T>
    __device__ void sign_row(
        const Encode<T>& call, const Row& row, i64 first, i64 high, T plus, T minus, u32* words
    ) const {
        const int lane = threadIdx.x % 32;
        const i64 i = first + lane;
        T q = i < high ? call.q(row, i) : T(0);
        u32 word = __ballot_sync(FULL, q < T(0));
        if (i < high) call.keep(row, i, q - (q < T(0) ? minus : plus));
        if (lane == 0) words[first / 32] = word;
    }

    // What an element adds to the two sums: |q| and nothing, or max(q, 0) and max(-q, 0).
    template <typename T> __device__ T part_above(T q) const {
        return means == 1 ? absolute(q) : (q < T(0) ? T(0) : q);
    }
    template <typename T> __device__ T part_below(T q) const { return means == 2 && q < T(0) ? -q : T(0); }

    // PER: elements of a lane, for a whole block of 32 * PER; 0 for any other.
    template <int PER, typename T>
    __device__ bool encode_block(const Encode<T>& call, const Row& row, i64 first, int num) const {
        const int lane = threadIdx.x % 32;
        T kept[PER ? PER : 1];
        T above[2] = {T(0), T(0)}, below[2] = {T(0), T(0)};  // of rows of 32, even and odd
        u32 mine = 0;                                        // the sign word that this lane will write
        int negative = 0;
        if (PER) {
#pragma unroll
            for (int part = 0; part < PER; ++part) kept[part] = call.q(row, first + 32 * part + lane);
#pragma unroll
            for (int part = 0; part < PER; ++part) {
                above[part % 2] += part_above(kept[part]);
                below[part % 2] += part_below(kept[part]);
                const u32 word = __ballot_sync(FULL, kept[part] < T(0));
                negative += __popc(word);
                mine = lane == part ? word : mine;
            }
        } else {
            for (int part = 0; part < num; part += 64) {
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const int i = part + 32 * odd + lane;
                    const T q = i < num ? call.q(row, first + i) : T(0);
                    above[odd] += part_above(q);
                    below[odd] += part_below(q);
                    negative += __popc(__ballot_sync(FULL, q < T(0)));
                }
            }
        }
        double sum_above = warp_sum(above[0], above[1]);
        double sum_below = means == 2 ? warp_sum(below[0], below[1]) : 0.0;
        if (!is_finite(sum_above + sum_below)) plain_sum(call, row, first, first + num, &sum_above, &sum_below);
        T plus, minus;
        T* values = call.template body<T>(row) + block_of(first, block) * means;
        if (means == 1) {
            plus = (T)(sum_above / num);
            minus = -plus;
        } else {
            plus = (T)(sum_above / largest((double)(num - negative), 1.0));
            minus = -(T)(sum_below / largest((double)negative, 1.0));
            if (lane == 1) values[1] = minus;
        }
        if (lane == 0) values[0] = plus;
        u32* words = call.template body<u32>(row, means * row.count * (i64)sizeof(T));
        if (PER) {
#pragma unroll
            for (int part = 0; part < PER; ++part) {
                const T q = kept[part];
                call.keep(row, first + 32 * part + lane, q - (q < T(0) ? minus : plus));
            }
            if (lane < PER) words[first / 32 + lane] = mine;
        } else {
            for (int part = 0; part < num; part += 32)
                sign_row(call, row, first + part, first + num, plus, minus, words);
        }
        return !is_finite(sum_above + sum_below);
    }

    // Over 64 lanes, two a thread, in float64 by halving; to all threads.
    template <typename T> __device__ static double warp_sum(T even, T odd) {
        double total = (double)even + (double)odd;
        for (int distance = 16; distance; distance /= 2) total += __shfl_down_sync(FULL, total, distance);
        return __shfl_sync(FULL, total, 0);
    }

    // In float64, one after the other: tells an overflow of the lanes from a number that is not finite itself.
    template <typename T>
    __device__ void plain_sum(
        const Encode<T>& call, const Row& row, i64 low, i64 high, double* above, double* below
    ) const {
        *above = 0;
        *below = 0;
        for (i64 i = low; i < high; ++i) {
            const double q = (double)call.q(row, i);
            if (means == 2 && q < 0)
                *below -= q;
            else
                *above += absolute(q);
        }
    }

    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        const BlockOf index_of = block ? BlockOf(low, block) : BlockOf();
        decode_sum(call, row, low, high, SignReader<T>{call, row, segment, low, means, index_of});
    }
};

// sums[tile] = sum of |q| of a tile of SUM_BLOCK elements, one thread a lane.
template <typename T> __device__ void sum_tile(const Encode<T>& call, double* sums) {
    __shared__ double tree[LANES];
    if (blockIdx.x >= call.num_tiles) return;
    const Tile tile = call.tiles[blockIdx.x];
    const Row row = call.rows[tile.segment];
    if (row.raw) return;
    const i64 high = least(tile.low + SUM_BLOCK, row.numel);
    T lane = 0;
#pragma unroll 8
    for (i64 i = tile.low + threadIdx.x; i < high; i += LANES) lane += absolute(call.q(row, i));
    tree[threadIdx.x] = (double)lane;
    for (int half = LANES / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) tree[threadIdx.x] += tree[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = tree[0];
}

// The scale of a segment, one block a segment: every thread adds the tiles of some chunks, the first the chunks.
template <typename T> __device__ void scale_segment(const Encode<T>& call, double* sums) {
    const Row row = call.rows[blockIdx.x];
    if (row.raw) return;
    const int per_chunk = CHUNK / SUM_BLOCK;
    for (i64 first = row.first_tile + (i64)threadIdx.x * per_chunk; first < row.end_tile;
         first += (i64)blockDim.x * per_chunk) {
        double total = 0;
        for (i64 tile = first; tile < least(first + per_chunk, row.end_tile); ++tile) total += sums[tile];
        if (!is_finite(total)) {
            const i64 low = (first - row.first_tile) * SUM_BLOCK;
            double nothing;
            Signs(0, 1).plain_sum(call, row, low, least(low + CHUNK, row.numel), &total, &nothing);
        }
        sums[first] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0;
        for (i64 first = row.first_tile; first < row.end_tile; first += per_chunk) total += sums[first];
        *call.template body<T>(row) = (T)(total / row.numel);
        if (!is_finite(total)) atomicOr(call.sync + 1, 1u);
    }
}

// Two bits: a word of signs and, ceil(d / 32) words further on, one of sizes, 1 = outer. Body: both means, the words.
template <typename T> struct TwoBitReader {
    struct Loaded {
        T inner, outer;
        u32 signs, sizes;
    };
    static const int each = 4, at_once = Number<T>::at_once / 4;
    const Decode<T>& call;
    const Row& row;
    i64 segment;
    i64 low;
    BlockOf index_of;

    __device__ Loaded load(const u8* body, int at) const {
        const T* values = (const T*)body + 2 * index_of.first + 2 * index_of(at);
        const u32* words = (const u32*)(body + 2 * row.count * (i64)sizeof(T)) + low / 32;
        return {values[0], values[1], words[at / 32], (words + (row.numel + 31) / 32)[at / 32]};
    }
    __device__ bool values(const Loaded& loaded, int at, T* value) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const T size = loaded.sizes >> (at % 32) & 1u << k ? loaded.outer : loaded.inner;
            value[k] = loaded.signs >> (at % 32) & 1u << k ? -size : size;
        }
        return !is_scale(loaded.inner) | !is_scale(loaded.outer) | (loaded.inner > loaded.outer);
    }
    __device__ void complain(i64 source) const { call.malformed(source, segment); }
};

struct TwoBits : Plain {
    int block;

    __device__ TwoBits(int block_) : block(block_) {}

    template <typename T> __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        bool bad = false;
        for (i64 first = low + (i64)(threadIdx.x / 32) * block; first < high; first += (i64)WARPS * block) {
            const int num = (int)least((i64)block, row.numel - first);
            bool wrong = num == 256 && block == 256 ? encode_block<8>(call, row, first, num)
                                                    : encode_block<0>(call, row, first, num);
            bad = bad || wrong;
        }
        return bad;
    }

    // PER as in Signs. `part` counts rows of 32 elements, one of each lane; those past the end are zero.
    template <int PER, typename T>
    __device__ bool encode_block(const Encode<T>& call, const Row& row, i64 first, int num) const {
        const int lane = threadIdx.x % 32, rows = PER ? PER : (num + 31) / 32;
        T kept[PER ? PER : 1];
        if (PER) {
#pragma unroll
            for (int part = 0; part < PER; ++part) kept[part] = call.q(row, first + 32 * part + lane);
        }
        const auto q_of = [&](int part) {
            const int i = 32 * part + lane;
            return PER ? kept[PER ? part : 0] : i < num ? call.q(row, first + i) : T(0);
        };
        T sum[2] = {T(0), T(0)}, below[2] = {T(0), T(0)}, above[2] = {T(0), T(0)};  // of even rows and of odd ones
#pragma unroll
        for (int part = 0; part < rows; part += 2) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) sum[odd] += absolute(q_of(part + odd));
        }
        double total = Signs::warp_sum(sum[0], sum[1]), nothing;
        if (!is_finite(total)) Signs(block, 1).plain_sum(call, row, first, first + num, &total, &nothing);
        const T mean = (T)(total / num);
        int count = 0;
#pragma unroll
        for (int part = 0; part < rows; part += 2) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const T size = absolute(q_of(part + odd));
                below[odd] += size > mean ? T(0) : size;
                above[odd] += size > mean ? size : T(0);
                count += __popc(__ballot_sync(FULL, size > mean));
            }
        }
        double sum_below = Signs::warp_sum(below[0], below[1]), sum_above = Signs::warp_sum(above[0], above[1]);
        if (!is_finite(sum_below + sum_above)) plain_parts(call, row, first, num, mean, &sum_below, &sum_above);
        const T inner = least((T)(sum_below / largest((double)(num - count), 1.0)), mean);
        const T outer = largest((T)(sum_above / largest((double)count, 1.0)), mean);
        T* values = call.template body<T>(row) + block_of(first, block) * 2;
        if (lane < 2) values[lane] = lane ? outer : inner;
        u32* words = call.template body<u32>(row, 2 * row.count * (i64)sizeof(T)) + first / 32;
        const i64 plane = (row.numel + 31) / 32;
        u32 my_signs = 0, my_sizes = 0;  // the words that this lane will write
#pragma unroll
        for (int part = 0; part < rows; ++part) {
            const T q = q_of(part);
            const bool is_outer = absolute(q) > mean;
            const u32 signs = __ballot_sync(FULL, q < T(0)), sizes = __ballot_sync(FULL, is_outer);
            const T size = is_outer ? outer : inner;
            if (32 * part + lane < num) call.keep(row, first + 32 * part + lane, q - (q < T(0) ? -size : size));
            my_signs = lane == part % 32 ? signs : my_signs;
            my_sizes = lane == part % 32 ? sizes : my_sizes;
            if (part % 32 == 31 || part + 1 == rows) {
                if (lane <= part % 32) {
                    words[part - part % 32 + lane] = my_signs;
                    words[part - part % 32 + lane + plane] = my_sizes;
                }
            }
        }
        return !is_finite(sum_below + sum_above);
    }

    // As Signs::plain_sum.
    template <typename T>
    __device__ void plain_parts(
        const Encode<T>& call, const Row& row, i64 first, int num, T mean, double* below, double* above
    ) const {
        *below = 0;
        *above = 0;
        for (i64 i = first; i < first + num; ++i) {
            const T size = absolute(call.q(row, i));
            *(size > mean ? above : below) += size;
        }
    }

    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        decode_sum(call, row, low, high, TwoBitReader<T>{call, row, segment, low, BlockOf(low, block)});
    }
};

KERNEL(sum_f32, LANES, (ENCODE_PARAMETERS(float), double* sums), sum_tile(ENCODE(float), sums))
KERNEL(sum_f64, LANES, (ENCODE_PARAMETERS(double), double* sums), sum_tile(ENCODE(double), sums))
KERNEL(scale_f32, THREADS, (ENCODE_PARAMETERS(float), double* sums), scale_segment(ENCODE(float), sums))
KERNEL(scale_f64, THREADS, (ENCODE_PARAMETERS(double), double* sums), scale_segment(ENCODE(double), sums))
KERNEL(encode_f32, THREADS, (ENCODE_PARAMETERS(float), int block, int means),
       encode_tile(ENCODE(float), Signs(block, means)))
KERNEL(encode_f64, THREADS, (ENCODE_PARAMETERS(double), int block, int means),
       encode_tile(ENCODE(double), Signs(block, means)))
SMALL_KERNEL(decode_f32, (DECODE_PARAMETERS(float), int block, int means),
       decode_tile(DECODE(float), Signs(block, means)))
SMALL_KERNEL(decode_f64, (DECODE_PARAMETERS(double), int block, int means),
       decode_tile(DECODE(double), Signs(block, means)))
KERNEL(encode_two_f32, THREADS, (ENCODE_PARAMETERS(float), int block), encode_tile(ENCODE(float), TwoBits(block)))
KERNEL(encode_two_f64, THREADS, (ENCODE_PARAMETERS(double), int block), encode_tile(ENCODE(double), TwoBits(block)))
SMALL_KERNEL(decode_two_f32, (DECODE_PARAMETERS(float), int block), decode_tile(DECODE(float), TwoBits(block)))
SMALL_KERNEL(decode_two_f64, (DECODE_PARAMETERS(double), int block), decode_tile(DECODE(double), TwoBits(block)))
