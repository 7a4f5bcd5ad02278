// Top-k, DGC and threshold: values and indices of what candidates.cuh finds. Format: espresso/compressors/sparse.py; twin:
// espresso/cpu_offload/sparse.py.

#include "common.cuh"
#include "selection.cuh"

#define TILE 4096
#include "candidates.cuh"
#include "slots.cuh"
#include "scatter.cuh"

template <typename T> struct Sparse {
    typedef typename Number<T>::Bits Bits;
    const Encode<T>& call;
    const Row& row;
    i64 high;
    Bits* values;
    u16* places;

    __device__ Sparse(const Encode<T>& call_, const Row& row_, i64, i64 high_, i64)
        : call(call_), row(row_), high(high_), values(call_.template body<Bits>(row_, 8)),
          places(call_.template body<u16>(row_, places_at(row_.numel, row_.count, sizeof(T)))) {}

    __device__ void put(i64 slot, u32 i, Bits bits) const {
        values[slot] = bits;
        places[slot] = (u16)(i % SPAN);
        call.keep(row, i, T(0));
    }

    __device__ void done(i64 end) const {
        if (threadIdx.x == 0 && high < row.numel && high % SPAN == 0)
            call.template body<u32>(row, ends_at(row.count, sizeof(T)))[high / SPAN - 1] = (u32)end;
    }

    __device__ void close(i64 sent) const {
        if (threadIdx.x == 0) {
            u32* prefix = call.template body<u32>(row);
            prefix[0] = (u32)sent;
            prefix[1] = 0;
        }
        for (i64 slot = sent + threadIdx.x; slot < row.count; slot += blockDim.x) {
            values[slot] = 0;
            places[slot] = 0;
        }
    }
};

SPARSE_KERNELS(float, f32, Sparse, Scatter)
SPARSE_KERNELS(double, f64, Sparse, Scatter)
