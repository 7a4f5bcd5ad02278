// Blockwise quantizers: int8, int4, fp8. Formats: espresso/compressors/blockwise.py; twins:
// espresso/cpu_offload/blockwise.py, fp8_kernels.py.
//
// Encode makes one pass. A warp takes a block: with the default of 256 elements q stays in registers between maximum
// and codes; other sizes read the block twice, the second time from the caches. Codes go through shared memory, so
// that they leave as whole words.

#include "common.cuh"

#define TILE 4096  // a multiple of every block
#define NEARLY 4  // numbers so near to infinity, in units of the last bit, count as it

template <typename T> struct Rounding;
template <> struct Rounding<float> {
    __device__ static float magic() { return 12582912.0f; }  // 1.5 * 2^23: adding it rounds to a whole number
    __device__ static float tiny() { return 7.888609052210118e-31f; }  // 2^-100
};
template <> struct Rounding<double> {
    __device__ static double magic() { return 6755399441055744.0; }  // 1.5 * 2^52
    __device__ static double tiny() { return 9.33263618503218878990e-302; }  // 2^-1000
};

template <typename B> __device__ inline B warp_largest(B value) {
    for (int distance = 16; distance; distance /= 2) value = largest(value, __shfl_xor_sync(FULL, value, distance));
    return value;
}

// A code, and the number that it stands for in units of the block's step.
template <typename T> struct Code {
    u8 bits;
    T value;
};

// Whole numbers, two's complement.
struct Whole {
    template <typename T> __device__ static Code<T> encode(T q, T inverse) {
        const T magic = Rounding<T>::magic();
        const T rounded = (q * inverse + magic) - magic;
        return {(u8)(signed char)(int)rounded, rounded};
    }
    template <int BITS, typename T> __device__ static T decode(u8 bits) { return (T)((signed char)bits >> (8 - BITS)); }
};

// 8-bit floating point, nearest even. Normal numbers are rounded in integer arithmetic; for the others, adding a
// number whose last bit weighs what the format's last bit weighs there does it.
template <int MANTISSA, int BIAS> struct Float8 {
    template <typename T> __device__ static Code<T> encode(T q, T inverse) {
        typedef typename Number<T>::Bits Bits;
        const int fraction = sizeof(T) == 4 ? 23 : 52, own_bias = sizeof(T) == 4 ? 127 : 1023;
        const int shift = fraction - MANTISSA, lift = 1 - BIAS - MANTISSA + fraction;
        const Bits bits = magnitude_of(q * inverse);
        const T size = number_of(bits);
        const T lifting = number_of((Bits)((Bits)(own_bias + lift) << fraction));                // 2^lift
        const T normal_from = number_of((Bits)((Bits)(own_bias + 1 - BIAS) << fraction));        // 2^(1 - BIAS)
        const Bits rounded = (bits + (((Bits)1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift;
        const T lifted = size + lifting;
        const bool is_small = size < normal_from, negative = q < T(0);
        const Bits code = is_small ? bits_of(lifted) - ((Bits)(own_bias + lift) << fraction)
                                   : rounded - ((Bits)(own_bias - BIAS) << MANTISSA);
        const T value = is_small ? lifted - lifting : number_of((Bits)(rounded << shift));
        return {(u8)(code | (negative ? 128 : 0)), negative ? -value : value};
    }
    template <int, typename T> __device__ static T decode(u8 bits) {
        const u32 extended = (u32)(signed char)bits << (23 - MANTISSA);  // the sign on top
        const float tiny = number_of(extended & (0x80000000u | 127u << (23 - MANTISSA)));
        return (T)(tiny * number_of((u32)(254 - BIAS) << 23));  // 2^(127 - BIAS), exact
    }
};

// Four elements: a body's codes begin on a multiple of four, and so do blocks.
template <int CODE_BITS, typename Form, typename T> struct BlockwiseReader {
    struct Loaded {
        T step;
        u32 codes;
    };
    static const int each = 4, at_once = Number<T>::at_once / 4;
    const Decode<T>& call;
    i64 segment;
    int block;
    int num;  // elements of the tile
    BlockOf index_of;

    __device__ Loaded load(const u8* body, int at) const {
        const int bytes = (int)sizeof(T) + block * CODE_BITS / 8, index = (int)index_of(at);
        const u8* place = body + index_of.first * bytes + index * bytes;
        const T step = *(const T*)place;
        place += sizeof(T);
        at -= index * block;
        if (CODE_BITS == 8) return {step, *(const u32*)(place + at)};
        const int half = half_of(index);
        if (half % 4 == 0) return {step, *(const u32*)(place + (at < half ? at : at - half))};
        u32 codes = 0;
#pragma unroll 1
        for (int k = 0; k < 4; ++k) {
            const int mine = least(at + k, 2 * half - 1);
            codes |= (u32)(mine < half ? place[mine] & 15 : place[mine - half] >> 4) << (8 * k);
        }
        return {step, codes};
    }
    __device__ bool values(const Loaded& loaded, int at, T* value) const {
        u32 codes = loaded.codes;
        if (CODE_BITS == 4) {
            const int index = (int)index_of(at), half = half_of(index);
            codes = half % 4 == 0 && at - index * block >= half ? codes : codes << 4;  // to the bytes' upper halves
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
            value[k] = Form::template decode<CODE_BITS, T>((u8)(codes >> (8 * k))) * loaded.step;
        return !is_scale(loaded.step);
    }
    __device__ void complain(i64 source) const { call.malformed(source, segment); }

    // int4: elements of a block's first half are low nibbles.
    __device__ int half_of(int index) const { return (least(block, num - index * block) + 1) / 2; }
};

template <int CODE_BITS, typename Form> struct Blockwise : Plain {
    int block;
    int levels;

    __device__ Blockwise(int block_, int levels_) : block(block_), levels(levels_) {}

    // PER: elements of a lane, for a whole block of 32 * PER; 0 for any other.
    template <int PER, typename T>
    __device__ bool encode_block(
        const Encode<T>& call, const Row& row, i64 first, int num, u8* codes
    ) const {
        typedef typename Number<T>::Bits Bits;
        const int lane = threadIdx.x % 32;
        T kept[PER ? PER : 1];
        Bits top_bits = 0;
        if (PER) {
#pragma unroll
            for (int part = 0; part < PER; ++part) kept[part] = call.q(row, first + 32 * part + lane);
#pragma unroll
            for (int part = 0; part < PER; ++part) top_bits = largest(top_bits, magnitude_of(kept[part]));
        } else {
            for (int i = lane; i < num; i += 32) top_bits = largest(top_bits, magnitude_of(call.q(row, first + i)));
        }
        top_bits = warp_largest(top_bits);
        const bool bad = top_bits >= Number<T>::infinity - NEARLY;
        const T top = bad ? T(0) : number_of(top_bits);
        const bool small = top < Rounding<T>::tiny();
        const T step = small ? T(0) : top / (T)levels;
        const T inverse = small ? T(0) : (T)levels / top;
        u8* place = call.template body<u8>(row, block_of(first, block) * (i64)(sizeof(T) + block * CODE_BITS / 8));
        if (lane == 0) *(T*)place = step;
        if (PER) {
#pragma unroll
            for (int part = 0; part < PER; ++part) {
                const Code<T> code = Form::encode(kept[part], inverse);
                codes[32 * part + lane] = code.bits;
                call.keep(row, first + 32 * part + lane, kept[part] - code.value * step);
            }
        } else {
            for (int i = lane; i < num; i += 32) {
                const T q = call.q(row, first + i);
                const Code<T> code = Form::encode(q, inverse);
                codes[i] = code.bits;
                call.keep(row, first + i, q - code.value * step);
            }
            if (lane == 0 && num % 2) codes[num] = 0;
        }
        __syncwarp();
        write_codes(codes, num, place + sizeof(T));
        return bad;
    }

    // Whole words, then the bytes that are left; a body's codes begin on a multiple of four.
    __device__ void write_codes(const u8* codes, int num, u8* out) const {
        const int lane = threadIdx.x % 32;
        const int bytes = CODE_BITS == 8 ? num : (num + 1) / 2;
        for (int word = lane; word < bytes / 4; word += 32) {
            u32 packed = 0;
            for (int byte = 0; byte < 4; ++byte) packed |= (u32)code_byte(codes, 4 * word + byte, bytes) << (8 * byte);
            ((u32*)out)[word] = packed;
        }
        for (int at = bytes / 4 * 4 + lane; at < bytes; at += 32) out[at] = code_byte(codes, at, bytes);
    }

    // int4: element at in the low nibble, element at + half in the high one.
    __device__ static u8 code_byte(const u8* codes, int at, int half) {
        if (CODE_BITS == 8) return codes[at];
        return (u8)((codes[at] & 15) | (codes[at + half] << 4));
    }

    template <typename T> __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        __shared__ __align__(16) u8 codes[TILE + 4];
        const int warp = threadIdx.x / 32;
        bool bad = false;
        for (i64 first = low + warp * block; first < high; first += WARPS * block) {
            const int num = (int)least((i64)block, high - first);
            u8* mine = codes + (first - low);
            bool wrong = num == 256 && block == 256 ? encode_block<8>(call, row, first, num, mine)
                                                    : encode_block<0>(call, row, first, num, mine);
            bad = bad || wrong;
        }
        return bad;
    }

    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        decode_sum(
            call, row, low, high,
            BlockwiseReader<CODE_BITS, Form, T>{call, segment, block, (int)(high - low), BlockOf(low, block)}
        );
    }
};

#define BLOCKWISE_KERNELS(name, Body)                                                                                \
    KERNEL(encode_##name##_f32, THREADS, (ENCODE_PARAMETERS(float), int block, int levels),                          \
           encode_tile(ENCODE(float), Body(block, levels)))                                                   \
    KERNEL(encode_##name##_f64, THREADS, (ENCODE_PARAMETERS(double), int block, int levels),                         \
           encode_tile(ENCODE(double), Body(block, levels)))                                                  \
    SMALL_KERNEL(decode_##name##_f32, (DECODE_PARAMETERS(float), int block, int levels),                          \
           decode_tile(DECODE(float), Body(block, levels)))                                                   \
    SMALL_KERNEL(decode_##name##_f64, (DECODE_PARAMETERS(double), int block, int levels),                         \
           decode_tile(DECODE(double), Body(block, levels)))

typedef Blockwise<8, Whole> Int8;
typedef Blockwise<4, Whole> Int4;
typedef Blockwise<8, Float8<3, 7>> E4m3;
typedef Blockwise<8, Float8<2, 15>> E5m2;

BLOCKWISE_KERNELS(int8, Int8)
BLOCKWISE_KERNELS(int4, Int4)
BLOCKWISE_KERNELS(e4m3, E4m3)
BLOCKWISE_KERNELS(e5m2, E5m2)
