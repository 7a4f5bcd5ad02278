// Stochastic quantizers: dithering, QSGD, natural compression, TernGrad. Format, formulas and draws:
// espresso/compressors/levels.py; twins: espresso/cpu_offload/level_kernels.py, level_vectors.py.
//
// One pass each way, a warp a block; the block is read a second time, from the caches, for its codes. A thread takes
// elements t and t + 32 of every row of 64: both draws come from one Philox counter.

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

    // The block's norm in float64; whether all is finite.
    __device__ bool norm_of(const Encode<T>& call, const Row& row, i64 first, int num, double* size) const {
        const int lane = threadIdx.x % 32;
        double even = 0, odd = 0;
        Bits top = 0;
        for (int part = 0; part < num; part += 64) {
            const int i = part + lane, j = i + 32;
            const T q = i < num ? call.q(row, first + i) : T(0), r = j < num ? call.q(row, first + j) : T(0);
            even += (double)q * (double)q;
            odd += (double)r * (double)r;
            top = largest(top, largest(magnitude_of(q), magnitude_of(r)));
        }
        if (norm == L2) {
            double total = even + odd;
            for (int distance = 16; distance; distance /= 2) total += __shfl_down_sync(FULL, total, distance);
            total = __shfl_sync(FULL, total, 0);
            *size = sqrt(total);
            return is_finite(total);
        }
        for (int distance = 16; distance; distance /= 2) top = largest(top, __shfl_xor_sync(FULL, top, distance));
        *size = (double)number_of(top);
        return top < limit;
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

    // What a code stands for, before the scale.
    __device__ T value_of(u32 code) const {
        const u32 sign = 1u << (width - 1), level = code & (sign - 1);
        const float power = number_of((level + (u32)(127 - levels)) << 23);
        const float value = natural ? (level ? power : 0.0f) : (float)level;
        return (T)(code & sign ? -value : value);
    }

    __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        const int lane = threadIdx.x % 32;
        const u64 key = mix64(mix64(salt ^ (u64)row.hash) + (u64)row.start);
        T* steps = call.template body<T>(row);
        u8* codes = call.template body<u8>(row, row.count * (i64)sizeof(T));
        bool bad = false;
        for (i64 first = low + (i64)(threadIdx.x / 32) * block; first < high; first += (i64)WARPS * block) {
            const int num = (int)least((i64)block, high - first);
            double size;
            bool good = norm_of(call, row, first, num, &size);
            T step = 1, inverse = 1;
            if (norm != NO_NORM) {
                const bool usable = tiny <= size && is_finite(size);
                step = usable ? (T)(size / divisor) : T(0);
                inverse = usable ? (T)(divisor / size) : T(0);
                if (lane == 0) steps[block_of(first, block)] = step;
            }
            bad = bad || !(good && is_finite(step));
            for (int part = 0; part < num; part += 64) {
                const Draws draws(key, (u64)(16 * ((first + part) / 64) + lane % 16));
                const u32 draw[2] = {lane < 16 ? draws.words[0] : draws.words[1],
                                     lane < 16 ? draws.words[2] : draws.words[3]};
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const int at = part + 32 * odd;
                    if (at >= num) break;
                    const int i = at + lane;
                    const T q = i < num ? call.q(row, first + i) : T(0);
                    const u32 code = i < num ? code_of(q, inverse, draw[odd]) : 0;
                    if (width == 8) {
                        if (i < num) codes[first + i] = (u8)code;
                    } else {
                        u32* planes = (u32*)codes + (first + at) / 32 * width;
                        for (int plane = 0; plane < width; ++plane) {
                            const u32 word = __ballot_sync(FULL, code >> plane & 1);
                            if (lane == plane) planes[plane] = word;
                        }
                    }
                    if (i < num) call.keep(row, first + i, q - value_of(code) * step);
                }
            }
        }
        return bad;
    }

    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        for (i64 i = low + threadIdx.x; i < high; i += blockDim.x) {
            T total = 0;
            for (i64 source = 0; source < call.num_rows; ++source) {
                const T step = norm == NO_NORM ? T(1) : call.template body<T>(source, row)[block_of(i, block)];
                if (!(step >= 0 && is_finite(step))) {
                    call.malformed(source, segment);
                    break;
                }
                const u8* codes = call.template body<u8>(source, row, row.count * (i64)sizeof(T));
                u32 code = 0;
                if (width == 8) {
                    code = codes[i];
                } else {
                    const u32* planes = (const u32*)codes + i / 32 * width;
                    for (int plane = 0; plane < width; ++plane) code |= (planes[plane] >> (i % 32) & 1) << plane;
                }
                const T value = value_of(code) * step;
                const T factor = source == call.num_rows - 1 ? call.scale : T(1);
                total = source ? (total + value) * factor : value * factor;
            }
            call.target[row.source + i] = total;
        }
    }
};

#define LEVEL_PARAMETERS(T) \
    int block, int width, int norm, int natural, double divisor, T cap, int levels, double tiny, \
        Number<T>::Bits limit, u64 salt
#define LEVELS(T) Levels<T>(block, width, norm, natural, divisor, cap, levels, tiny, limit, salt)

KERNEL(encode_f32, THREADS, (ENCODE_PARAMETERS(float), LEVEL_PARAMETERS(float)),
       encode_tile(ENCODE(float), LEVELS(float)))
KERNEL(encode_f64, THREADS, (ENCODE_PARAMETERS(double), LEVEL_PARAMETERS(double)),
       encode_tile(ENCODE(double), LEVELS(double)))
KERNEL(decode_f32, THREADS, (DECODE_PARAMETERS(float), LEVEL_PARAMETERS(float)),
       decode_tile(DECODE(float), LEVELS(float)))
KERNEL(decode_f64, THREADS, (DECODE_PARAMETERS(double), LEVEL_PARAMETERS(double)),
       decode_tile(DECODE(double), LEVELS(double)))
