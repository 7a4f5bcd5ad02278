// Random-k with a shared seed. Format and drawing: espresso/compressors/randomk.py; twin: espresso/cpu_offload/randomk.py.
//
// One pass each way: a thread block takes a stratum. Its q go to the residual while they are looked at; the drawn ones
// are read again, from the caches, and cleared.

#include "common.cuh"

#define STRATUM 4096
#define ROUNDS 4

struct Draw {
    u64 key;      // of the segment
    u64 stratum;  // of the stratum
    u64 half, mask, num;
    i64 begin, stop;  // slots

    __device__ Draw(const Row& row, u64 salt, i64 low, i64 high) {
        key = mix64(mix64(salt ^ (u64)row.hash) + (u64)row.start);
        stratum = mix64(key + (u64)(low / STRATUM));
        num = (u64)(high - low);
        half = 1;
        while ((1ull << (half + half)) < num) ++half;
        mask = (1ull << half) - 1;
        begin = first_slot(row, low);
        stop = first_slot(row, high);
    }

    // How many slots lie before an element that begins a stratum, or before the end.
    __device__ i64 first_slot(const Row& row, i64 element) const {
        u64 shift = mix64(key + (1ull << 63)) % (u64)row.numel;
        return (i64)((shift + (u64)row.count * (u64)element) / (u64)row.numel);
    }

    // P(j): a Feistel network, walked until it falls inside.
    __device__ u64 position(u64 j) const {
        u64 x = j;
        do {
            u64 left = x >> half, right = x & mask;
            for (u64 round = 0; round < ROUNDS; ++round) {
                u64 mixed = mix64(stratum + 65536 * round + right);
                u64 old_left = left;
                left = right;
                right = old_left ^ (mixed & mask);
            }
            x = (left << half) | right;
        } while (x >= num);
        return x;
    }
};

struct RandomK {
    u64 salt;

    __device__ explicit RandomK(u64 salt_) : salt(salt_) {}

    template <typename T> __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        bool bad = false;
        if (low >= high) return false;
        for (i64 first = low; first < high; first += Number<T>::at_once * THREADS) {
            T q[Number<T>::at_once];
            load_q(call, row, first, high, q);
#pragma unroll
            for (int part = 0; part < Number<T>::at_once; ++part) {
                const i64 i = first + part * THREADS + threadIdx.x;
                bad = bad || !is_finite(q[part]);
                if (i < high) call.keep(row, i, q[part]);
            }
        }
        __syncthreads();
        const Draw draw(row, salt, low, high);
        T* out = call.template body<T>(row);
        for (i64 slot = draw.begin + threadIdx.x; slot < draw.stop; slot += blockDim.x) {
            i64 i = low + (i64)draw.position((u64)(slot - draw.begin));
            out[slot] = call.q(row, i);
            call.keep(row, i, T(0));
        }
        return bad;
    }

    // In a vector without a header, a number that is not finite and was not drawn shows as a NaN in the first place.
    template <typename T> __device__ void finished(const Encode<T>& call, bool bad) const {
        if (bad && !call.header_bytes && threadIdx.x == 0)
            *(T*)call.payload = number_of((typename Number<T>::Bits)(Number<T>::infinity | (Number<T>::infinity >> 1)));
    }

    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64, i64 low, i64 high) const {
        if (low >= high) return;
        for (i64 i = low + threadIdx.x; i < high; i += blockDim.x) call.target[row.source + i] = T(0);
        __syncthreads();
        const Draw draw(row, salt, low, high);
        bool bad = false;
        for (i64 slot = draw.begin + threadIdx.x; slot < draw.stop; slot += blockDim.x) {
            T total = 0;
            for (i64 source = 0; source < call.num_rows; ++source) {
                T value = call.template body<T>(source, row)[slot];
                bad = bad || !is_finite(value);
                total += value;
            }
            call.target[row.source + low + (i64)draw.position((u64)(slot - draw.begin))] = total * call.scale;
        }
        if (!call.header_bytes && bad) call.status[0] = 1;
    }
};

KERNEL(encode_f32, THREADS, (ENCODE_PARAMETERS(float), u64 salt), encode_tile(ENCODE(float), RandomK(salt)))
KERNEL(encode_f64, THREADS, (ENCODE_PARAMETERS(double), u64 salt), encode_tile(ENCODE(double), RandomK(salt)))
SMALL_KERNEL(decode_f32, (DECODE_PARAMETERS(float), u64 salt), decode_tile(DECODE(float), RandomK(salt)))
SMALL_KERNEL(decode_f64, (DECODE_PARAMETERS(double), u64 salt), decode_tile(DECODE(double), RandomK(salt)))
