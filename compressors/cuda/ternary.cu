// Sparse ternary: signs and places of what candidates.cuh finds. Format: espresso/compressors/ternary.py; twin:
// espresso/cpu_offload/ternary.py.

#include "common.cuh"
#include "selection.cuh"

#define TILE 4096  // elements that share a mean
#include "candidates.cuh"

#define COUNTED 128  // elements whose slots are counted together
#define GROUPS (TILE / COUNTED)
#define HELD (8192 / sizeof(T))  // numbers of a tile that stay in shared memory; those behind are read again

// In bytes from the body's beginning; means come at 8.
__device__ inline i64 num_means(i64 numel) { return (numel + TILE - 1) / TILE; }
__device__ inline i64 ends_at(i64 numel, i64 itemsize) { return 8 + itemsize * num_means(numel); }
__device__ inline i64 counts_at(i64 numel, i64 itemsize) {
    return ends_at(numel, itemsize) + 4 * (num_means(numel) - 1);
}
__device__ inline i64 slots_at(i64 numel, i64 itemsize) {
    return counts_at(numel, itemsize) + (numel + COUNTED - 1) / COUNTED;
}

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
        __shared__ u32 counts[GROUPS];
        const u32 num = (u32)(end - begin);
        __syncthreads();
        if (threadIdx.x < GROUPS) counts[threadIdx.x] = 0;
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
        u8* slots = call.template body<u8>(row, slots_at(row.numel, sizeof(T))) + begin;
        for (u32 nth = threadIdx.x; nth < num; nth += blockDim.x) {
            const u32 place = places[nth];
            const T value = q(nth);
            const bool negative = value < T(0);
            slots[nth] = (u8)(place % COUNTED | (negative ? COUNTED : 0));
            atomicAdd(&counts[place / COUNTED], 1u);
            call.keep(row, low + place, value - (negative ? -mean : mean));
        }
        __syncthreads();
        if (threadIdx.x < GROUPS && low + threadIdx.x * COUNTED < high)
            call.template body<u8>(row, counts_at(row.numel, sizeof(T)))[low / COUNTED + threadIdx.x] =
                (u8)counts[threadIdx.x];
        if (threadIdx.x == 0) {
            call.template body<T>(row, 8)[low / TILE] = mean;
            if (high < row.numel) call.template body<u32>(row, ends_at(row.numel, sizeof(T)))[low / TILE] = (u32)end;
        }
    }

    __device__ void close(i64 sent) const {
        if (threadIdx.x == 0) {
            u32* prefix = call.template body<u32>(row);
            prefix[0] = (u32)sent;
            prefix[1] = 0;
        }
        u8* slots = call.template body<u8>(row, slots_at(row.numel, sizeof(T)));
        for (i64 slot = sent + threadIdx.x; slot < row.count; slot += blockDim.x) slots[slot] = 0;
    }
};

// A tile is summed in shared memory: rows in order, the slots of a row side by side. Counts, places and means are all
// checked; one tile's end is where the next begins, so that a row passes only if all of it is good.
struct TernaryScatter {
    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        __shared__ T total[TILE];
        __shared__ u32 firsts[GROUPS + 1];  // slots of the tile before each group
        const i64 tile = low / TILE, itemsize = sizeof(T);
        for (int i = threadIdx.x; i < TILE; i += blockDim.x) total[i] = T(0);
        for (i64 source = 0; source < call.num_rows; ++source) {
            const u32* prefix = call.template body<u32>(source, row);
            const u32* ends = call.template body<u32>(source, row, ends_at(row.numel, itemsize));
            const u8* counts = call.template body<u8>(source, row, counts_at(row.numel, itemsize)) + low / COUNTED;
            const T mean = call.template body<T>(source, row, 8)[tile];
            const i64 begin = tile > 0 ? (i64)ends[tile - 1] : 0;
            const i64 stop = high < row.numel ? (i64)ends[tile] : (i64)prefix[0];
            __syncthreads();
            if (threadIdx.x < 32) {
                u32 through = low + threadIdx.x * COUNTED < high ? counts[threadIdx.x] : 0;
                for (int distance = 1; distance < 32; distance *= 2) {
                    const u32 other = __shfl_up_sync(FULL, through, distance);
                    if (threadIdx.x >= distance) through += other;
                }
                firsts[threadIdx.x + 1] = through;
                if (threadIdx.x == 0) firsts[0] = 0;
            }
            __syncthreads();
            const bool fits = prefix[0] <= row.count && prefix[1] == 0 && stop <= (i64)prefix[0] &&
                              stop - begin == (i64)firsts[GROUPS] && mean >= T(0) && is_finite(mean);
            if (!fits) {
                if (threadIdx.x == 0) call.malformed(source, segment);
                continue;
            }
            const u8* slots = call.template body<u8>(source, row, slots_at(row.numel, itemsize)) + begin;
            for (i64 slot = threadIdx.x; slot < stop - begin; slot += blockDim.x) {
                int group = 0;  // the last whose first slot is not behind this one
                for (int step = GROUPS / 2; step > 0; step /= 2)
                    if (firsts[group + step] <= slot) group += step;
                const int place = slots[slot] % COUNTED, at = group * COUNTED + place;
                const int previous = slot > firsts[group] ? slots[slot - 1] % COUNTED : -1;
                if (place <= previous || at >= high - low)
                    call.malformed(source, segment);
                else
                    total[at] += slots[slot] >= COUNTED ? -mean : mean;
            }
        }
        __syncthreads();
        for (i64 i = low + threadIdx.x; i < high; i += blockDim.x)
            call.target[row.source + i] = call.scale == T(1) ? total[i - low] : total[i - low] * call.scale;
    }
};

SPARSE_KERNELS(float, f32, Ternary, TernaryScatter)
SPARSE_KERNELS(double, f64, Ternary, TernaryScatter)
