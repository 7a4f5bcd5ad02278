// Stochastic quantizers: dithering, QSGD, natural compression, TernGrad. Format, formulas and draws:
// espresso/compressors/levels.py; twins: espresso/cpu_offload/levels.py, level_vectors.py.
//
// One pass each way, a warp a block. With blocks of 256 q stays in registers; other sizes are read a second time, from
// the caches, for their codes. A thread takes elements t and t + 32 of every row of 64: both draws come from one Philox
// counter, which threads t and t + 16 share.

#include "common.cuh"

#define NO_NORM 0
#define L2 2

struct Draws {
    u32 words[4];

    // Philox4x32-10 (Salmon et al., SC 2011).
    __device__ Draws(u64 key, u64 counter) {
        u32 w[4] = {(u32)counter, (u32)(counter >> 32), 0, 0};
        u32 k0 = (u32)key, k1 = (u32)(key >> 32);
        for (int round = 0; round < 10; ++round) {
            const u64 p0 = (u64)w[0] * 0xD2511F53u, p1 = (u64)w[2] * 0xCD9E8D57u;
            const u32 next0 = (u32)(p1 >> 32) ^ w[1] ^ k0, next2 = (u32)(p0 >> 32) ^ w[3] ^ k1;
            w[0] = next0;
            w[1] = (u32)p1;
            w[2] = next2;
            w[3] = (u32)p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (int i = 0; i < 4; ++i) words[i] = w[i];
    }
};

__device__ inline float uniform_of(u32 draw, float) { return (float)(draw >> 8) * 5.9604644775390625e-08f; }
__device__ inline double uniform_of(u32 draw, double) { return (double)draw * 2.3283064365386962890625e-10; }
__device__ inline u32 exponent_of(float v, u32 draw) { return (bits_of(v) + (draw >> 9)) >> 23; }
__device__ inline u32 exponent_of(double v, u32 draw) { return (u32)((bits_of(v) + ((u64)draw << 20)) >> 52); }

// 2 to a power.
__device__ inline float power_of_two(int exponent, float) { return number_of((u32)(127 + exponent) << 23); }
__device__ inline double power_of_two(int exponent, double) { return number_of((u64)(1023 + exponent) << 52); }

// Bit i of lane j of a warp becomes bit j of lane i.
__device__ inline u32 transposed(u32 bits) {
    u32 low = 0x0000ffffu;  // those that a lower lane keeps
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        const u32 other = __shfl_xor_sync(FULL, bits, distance);
        bits = threadIdx.x & distance ? (bits & ~low) | (other >> distance & low)
                                      : (bits & low) | (other & low) << distance;
        low ^= low << distance / 2;
    }
    return bits;
}

template <typename T> struct LevelReader;

template <typename T> struct Levels : Plain {
    typedef typename Number<T>::Bits Bits;
    int block;
    int width;    // bits of a code
    int norm;     // espresso.compressors.levels.Norm
    int natural;  // levels are powers of two
    double divisor;
    T cap;       // of v
    int levels;  // the level that stands for the norm, or for 1
    double tiny;
    Bits limit;  // magnitudes from here on count as not finite
    u64 salt;

    __device__ Levels(
        int block_, int width_, int norm_, int natural_, double divisor_, T cap_, int levels_, double tiny_,
        Bits limit_, u64 salt_
    )
        : block(block_), width(width_), norm(norm_), natural(natural_), divisor(divisor_), cap(cap_), levels(levels_),
          tiny(tiny_), limit(limit_), salt(salt_) {}

    // PER: elements of a lane, for a whole block of 32 * PER; 0 for any other. Returns whether something is not finite.
    template <int PER>
    __device__ bool encode_block(const Encode<T>& call, const Row& row, i64 first, int num, u64 key) const {
        const int lane = threadIdx.x % 32;
        T kept[PER ? PER : 2];
        double even = 0, odd = 0;
        Bits top = 0;
        if (PER) {
#pragma unroll
            for (int part = 0; part < PER; ++part) kept[part] = call.q(row, first + 32 * part + lane);
#pragma unroll
            for (int part = 0; part < PER; part += 2) add_to_norm(kept + part, even, odd, top);
        } else {
            for (int part = 0; part < num; part += 64) {
                load_two(call, row, first, part + lane, num, kept);
                add_to_norm(kept, even, odd, top);
            }
        }
        double size;
        const bool good = norm_of(even, odd, top, &size);
        T step = 1, inverse = 1;
        if (norm != NO_NORM) {
            const bool usable = tiny <= size && is_finite(size);
            step = usable ? (T)(size / divisor) : T(0);
            inverse = usable ? (T)(divisor / size) : T(0);
            if (lane == 0) call.template body<T>(row)[block_of(first, block)] = step;
        }
        const u64 counter = (u64)(16 * (first / 64) + lane % 16);
        u8* codes = call.template body<u8>(row, row.count * (i64)sizeof(T));
        if (PER) {
#pragma unroll
            for (int part = 0; part < PER; part += 4) {  // the lower half draws for two rows of 32, the upper for the next
                const Draws draws(key, counter + 16 * (part / 2 + lane / 16));
                const u32 low = lane < 16 ? draws.words[0] : draws.words[1];
                const u32 high = lane < 16 ? draws.words[2] : draws.words[3];
                const u32 other_low = __shfl_xor_sync(FULL, lane < 16 ? draws.words[1] : draws.words[0], 16);
                const u32 other_high = __shfl_xor_sync(FULL, lane < 16 ? draws.words[3] : draws.words[2], 16);
                const u32 draw[4] = {lane < 16 ? low : other_low, lane < 16 ? high : other_high,
                                     lane < 16 ? other_low : low, lane < 16 ? other_high : high};
                u32 packed = 0;  // of the thread's codes; a warp's planes follow one another in the body
#pragma unroll
                for (int odd_part = 0; odd_part < 4; ++odd_part) {
                    const i64 i = first + 32 * (part + odd_part) + lane;
                    const u32 code = coded(call, row, i, kept[part + odd_part], draw[odd_part], step, inverse);
                    if (width == 8)
                        codes[i] = (u8)code;
                    else
                        packed |= code << (odd_part * width);
                }
                if (width < 8) {
                    const u32 word = transposed(packed);
                    if (lane < 4 * width) ((u32*)codes)[(first / 32 + part) * width + lane] = word;
                }
            }
        } else {
            for (int part = 0; part < num; part += 64) {
                const Draws draws(key, counter + (u64)(part / 4));
                load_two(call, row, first, part + lane, num, kept);
                emit(call, row, first, part, num, kept[0], lane < 16 ? draws.words[0] : draws.words[1], step, inverse);
                if (part + 32 < num)
                    emit(call, row, first, part + 32, num, kept[1], lane < 16 ? draws.words[2] : draws.words[3], step,
                         inverse);
            }
        }
        return !(good && is_finite(step));
    }

    __device__ static void load_two(const Encode<T>& call, const Row& row, i64 first, int i, int num, T* kept) {
        kept[0] = i < num ? call.q(row, first + i) : T(0);
        kept[1] = i + 32 < num ? call.q(row, first + i + 32) : T(0);
    }

    __device__ static void add_to_norm(const T* kept, double& even, double& odd, Bits& top) {
        even += (double)kept[0] * (double)kept[0];
        odd += (double)kept[1] * (double)kept[1];
        top = largest(top, largest(magnitude_of(kept[0]), magnitude_of(kept[1])));
    }

    // The block's norm in float64; whether all is finite.
    __device__ bool norm_of(double even, double odd, Bits top, double* size) const {
        if (norm == L2) {
            double total = even + odd;
            for (int distance = 16; distance; distance /= 2) total += __shfl_down_sync(FULL, total, distance);
            total = __shfl_sync(FULL, total, 0);
            *size = sqrt(total);
            return *size < (double)number_of(limit);
        }
        for (int distance = 16; distance; distance /= 2) top = largest(top, __shfl_xor_sync(FULL, top, distance));
        *size = (double)number_of(top);
        return top < limit;
    }

    // Code and residual of a warp's 32 elements from `at` on, within the block.
    __device__ void emit(
        const Encode<T>& call, const Row& row, i64 first, int at, int num, T q, u32 draw, T step, T inverse
    ) const {
        const int lane = threadIdx.x % 32, i = at + lane;
        u8* codes = call.template body<u8>(row, row.count * (i64)sizeof(T));
        const u32 code = i < num ? coded(call, row, first + i, q, draw, step, inverse) : 0;
        if (width == 8) {
            if (i < num) codes[first + i] = (u8)code;
        } else {
            u32 mine = 0;
            for (int plane = 0; plane < width; ++plane) {
                const u32 word = __ballot_sync(FULL, code >> plane & 1);
                mine = lane == plane ? word : mine;
            }
            if (lane < width) ((u32*)codes)[(first + at) / 32 * width + lane] = mine;
        }
    }

    // The code of q; what it loses is kept.
    __device__ u32 coded(const Encode<T>& call, const Row& row, i64 i, T q, u32 draw, T step, T inverse) const {
        const u32 code = code_of(q, inverse, draw);
        call.keep(row, i, q - value_of(code) * step);
        return code;
    }

    __device__ u32 code_of(T q, T inverse, u32 draw) const {
        const u32 sign = 1u << (width - 1);
        T v = number_of(magnitude_of(q)) * inverse;
        v = v > cap ? cap : v;
        u32 level;
        if (natural) {
            const int base = (sizeof(T) == 4 ? 127 : 1023) - levels;
            const T smallest = power_of_two(1 - levels, T(0)), lift = power_of_two(levels - 1, T(0));
            level = v < smallest ? (u32)(uniform_of(draw, T(0)) < v * lift) : exponent_of(v, draw) - base;
        } else {
            const int whole = (int)v;
            level = (u32)(whole + (uniform_of(draw, T(0)) < v - (T)whole));
        }
        return (level | (q < T(0) ? sign : 0)) & ((sign << 1) - 1);
    }

    // What a code stands for, before the scale. Bits above it do not count.
    __device__ T value_of(u32 code) const {
        const u32 level = code & ((1u << (width - 1)) - 1);
        const float power = number_of(level << 23) * number_of((u32)(254 - levels) << 23);  // exact; zero of zero
        const float value = natural ? power : (float)level;
        return (T)number_of(bits_of(value) | (code << (32 - width) & 0x80000000u));
    }

    __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        const u64 key = mix64(mix64(salt ^ (u64)row.hash) + (u64)row.start);
        bool bad = false;
        for (i64 first = low + (i64)(threadIdx.x / 32) * block; first < high; first += (i64)WARPS * block) {
            const int num = (int)least((i64)block, high - first);
            bool wrong = num == 256 && block == 256 ? encode_block<8>(call, row, first, num, key)
                                                    : encode_block<0>(call, row, first, num, key);
            bad = bad || wrong;
        }
        return bad;
    }

    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        decode_sum(
            call, row, low, high,
            LevelReader<T>{call, *this, segment, row.count * (i64)sizeof(T) + low / 8 * width, BlockOf(low, block)}
        );
    }
};

// Four elements: their bytes, or, as eight threads have the same 32 elements, a word of planes for each of these.
template <typename T> struct LevelReader {
    struct Loaded {
        T step;
        u32 codes;
    };
    static const int each = 4, at_once = Number<T>::at_once / 4;
    const Decode<T>& call;
    const Levels<T>& levels;
    i64 segment;
    i64 first;  // byte of the tile's codes
    BlockOf index_of;

    __device__ Loaded load(const u8* body, int at) const {
        const int width = levels.width, plane = least((int)threadIdx.x % 8, width - 1);
        const T step = levels.norm == NO_NORM ? T(1) : ((const T*)body + index_of.first)[index_of(at)];
        return {step, ((const u32*)(body + first))[width == 8 ? at / 4 : at / 32 * width + plane]};
    }
    __device__ bool values(const Loaded& loaded, int at, T* value) const {
        const T step = loaded.step;
        u32 codes = loaded.codes;
        if (levels.width < 8) {
            codes = 0;
            for (int plane = levels.width - 1; plane >= 0; --plane) {
                const u32 mine = __shfl_sync(FULL, loaded.codes, threadIdx.x % 32 / 8 * 8 + plane) >> (at % 32) & 15;
                codes = codes << 1 | (mine * 0x00204081u & 0x01010101u);  // a bit to every byte
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) value[k] = levels.value_of(codes >> (8 * k)) * step;
        return !is_scale(step);
    }
    __device__ void complain(i64 source) const { call.malformed(source, segment); }
};

#define LEVEL_PARAMETERS(T) \
    int block, int width, int norm, int natural, double divisor, T cap, int levels, double tiny, \
        Number<T>::Bits limit, u64 salt
#define LEVELS(T) Levels<T>(block, width, norm, natural, divisor, cap, levels, tiny, limit, salt)

KERNEL(encode_f32, THREADS, (ENCODE_PARAMETERS(float), LEVEL_PARAMETERS(float)),
       encode_tile(ENCODE(float), LEVELS(float)))
KERNEL(encode_f64, THREADS, (ENCODE_PARAMETERS(double), LEVEL_PARAMETERS(double)),
       encode_tile(ENCODE(double), LEVELS(double)))
SMALL_KERNEL(decode_f32, (DECODE_PARAMETERS(float), LEVEL_PARAMETERS(float)),
       decode_tile(DECODE(float), LEVELS(float)))
SMALL_KERNEL(decode_f64, (DECODE_PARAMETERS(double), LEVEL_PARAMETERS(double)),
       decode_tile(DECODE(double), LEVELS(double)))
