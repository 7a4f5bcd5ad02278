// Casts to 16 bits and back, in the integer arithmetic of espresso/cpu_offload/casts.py, so that every NaN and
// every subnormal comes out the same. One pass each way.

#include "common.cuh"

// float32(q); a wider q is rounded to odd, so that the rounding to 16 bits that follows is right.
__device__ inline float narrow(float q) { return q; }
__device__ inline float narrow(double q) {
    float single = (float)q;
    u32 inexact = (double)single != q && q == q;
    u32 toward_zero = number_of(magnitude_of((double)single)) > number_of(magnitude_of(q));
    return number_of((u32)((bits_of(single) - toward_zero) | inexact));
}

// IEEE half precision, nearest even. Subnormals: adding 0.5, whose last bit weighs what a half's last weighs.
__device__ inline u16 to_half(float single) {
    u32 bits = bits_of(single);
    u32 sign = bits & 0x80000000u, size = bits ^ sign;
    u32 half;
    if (size < 0x38800000u)
        half = bits_of(number_of(size) + 0.5f) - 0x3f000000u;
    else if (size >= 0x47800000u)
        half = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    else
        half = (size - 0x37fff001u + ((size >> 13) & 1u)) >> 13;
    return (u16)(half | (sign >> 16));
}

__device__ inline float from_half(u16 half) {
    float scaled = number_of(((u32)half & 0x7fffu) << 13) * 5192296858534827628530496329220096.0f;  // 2^112
    u32 size = bits_of(scaled);
    if (scaled >= 65536.0f) size |= 0x7f800000u;
    return number_of(size | (((u32)half & 0x8000u) << 16));
}

// The upper half of a float32, nearest even.
__device__ inline u16 to_bfloat(float single) {
    u32 bits = bits_of(single);
    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    u32 kept = is_nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    return (u16)(kept >> 16);
}

__device__ inline float from_bfloat(u16 brain) { return number_of((u32)brain << 16); }

template <bool HALF> struct Coding {
    static const u16 infinity = HALF ? 0x7c00 : 0x7f80;

    __device__ static u16 narrowed(float single) { return HALF ? to_half(single) : to_bfloat(single); }
    __device__ static float widened(u16 code) { return HALF ? from_half(code) : from_bfloat(code); }
    __device__ static bool is_infinite(u16 code) { return (code & infinity) == infinity; }
};

template <bool HALF, typename T> struct CastReader {
    typedef u16 Loaded;
    static const int each = 1, at_once = Number<T>::at_once;
    const Decode<T>& call;
    i64 low;

    __device__ u16 load(const u8* body, int at) const { return ((const u16*)body + low)[at]; }
    __device__ bool values(u16 code, int, T* value) const {
        *value = (T)Coding<HALF>::widened(code);
        return Coding<HALF>::is_infinite(code);
    }
    __device__ void complain(i64) const {
        if (!call.header_bytes) call.status[0] = 1;
    }
};

template <bool HALF> struct Cast : Plain {
    // An overflow counts as not finite.
    template <typename T> __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        u16* out = call.template body<u16>(row);
        bool bad = false;
        for (i64 first = low; first < high; first += Number<T>::at_once * THREADS) {
            T q[Number<T>::at_once];
            load_q(call, row, first, high, q);
#pragma unroll
            for (int part = 0; part < Number<T>::at_once; ++part) {
                const i64 i = first + part * THREADS + threadIdx.x;
                const u16 code = Coding<HALF>::narrowed(narrow(q[part]));
                bad = bad || Coding<HALF>::is_infinite(code);
                if (i < high) {
                    out[i] = code;
                    call.keep(row, i, q[part] - (T)Coding<HALF>::widened(code));
                }
            }
        }
        return bad;
    }

    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64, i64 low, i64 high) const {
        decode_sum(call, row, low, high, CastReader<HALF, T>{call, low});
    }
};

KERNEL(encode_half_f32, THREADS, (ENCODE_PARAMETERS(float)), encode_tile(ENCODE(float), Cast<true>()))
KERNEL(encode_half_f64, THREADS, (ENCODE_PARAMETERS(double)), encode_tile(ENCODE(double), Cast<true>()))
SMALL_KERNEL(decode_half_f32, (DECODE_PARAMETERS(float)), decode_tile(DECODE(float), Cast<true>()))
SMALL_KERNEL(decode_half_f64, (DECODE_PARAMETERS(double)), decode_tile(DECODE(double), Cast<true>()))
KERNEL(encode_bfloat_f32, THREADS, (ENCODE_PARAMETERS(float)), encode_tile(ENCODE(float), Cast<false>()))
KERNEL(encode_bfloat_f64, THREADS, (ENCODE_PARAMETERS(double)), encode_tile(ENCODE(double), Cast<false>()))
SMALL_KERNEL(decode_bfloat_f32, (DECODE_PARAMETERS(float)), decode_tile(DECODE(float), Cast<false>()))
SMALL_KERNEL(decode_bfloat_f64, (DECODE_PARAMETERS(double)), decode_tile(DECODE(double), Cast<false>()))
