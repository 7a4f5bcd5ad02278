// No compression: every segment is raw. One pass each way. Twin: espresso/cpu_offload/casts.py.

#include "common.cuh"

struct Nothing : Plain {
    template <typename T> __device__ bool encode(const Encode<T>&, const Row&, i64, i64) const { return false; }
    template <typename T> __device__ void decode(const Decode<T>&, const Row&, i64, i64, i64) const {}
};

KERNEL(encode_f32, THREADS, (ENCODE_PARAMETERS(float)), encode_tile(ENCODE(float), Nothing()))
KERNEL(encode_f64, THREADS, (ENCODE_PARAMETERS(double)), encode_tile(ENCODE(double), Nothing()))
SMALL_KERNEL(decode_f32, (DECODE_PARAMETERS(float)), decode_tile(DECODE(float), Nothing()))
SMALL_KERNEL(decode_f64, (DECODE_PARAMETERS(double)), decode_tile(DECODE(double), Nothing()))
