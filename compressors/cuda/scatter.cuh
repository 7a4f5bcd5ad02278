// How the sparsifiers decode. Needs common.cuh and TILE.

#define SEARCHES 32  // rows whose slots are looked up together

// The first slot whose index is at least `wanted`, if the indices ascend; a warp looks at 32 places at once.
__device__ inline i64 lower_bound(const u32* indices, i64 num, i64 wanted) {
    const int lane = threadIdx.x % 32;
    i64 low = 0, high = num;
    while (low < high) {
        const i64 step = (high - low + 31) / 32;
        const i64 probe = least(low + (lane + 1) * step, high) - 1;
        const u32 less = __ballot_sync(FULL, (i64)indices[probe] < wanted);
        if (less == FULL) return high;
        const int first = __ffs((int)~less) - 1;
        high = least(low + (first + 1) * step, high) - 1;
        low += first * step;
    }
    return low;
}

// A tile is summed in shared memory: rows in order, the slots of a row side by side. Every index is checked, in the
// tile and ascending; neighbouring tiles search for the same bound, so a row passes only if all its indices are good.
struct Scatter {
    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        __shared__ T total[TILE];
        __shared__ i64 bounds[2 * SEARCHES];
        for (int i = threadIdx.x; i < TILE; i += blockDim.x) total[i] = T(0);
        for (i64 first = 0; first < call.num_rows; first += SEARCHES) {
            const i64 end = least(first + SEARCHES, call.num_rows);
            __syncthreads();
            for (i64 search = 2 * first + threadIdx.x / 32; search < 2 * end; search += WARPS) {
                const u32* prefix = call.template body<u32>(search / 2, row);
                const i64 num = prefix[0];
                const bool wrong = num > row.count || prefix[1] != 0;
                const u32* indices = call.template body<u32>(search / 2, row, 8 + row.count * (i64)sizeof(T));
                i64 bound = wrong ? -1 : lower_bound(indices, num, search % 2 ? high : low);
                if (search % 2 && high == row.numel && bound != num) bound = -1;
                if (threadIdx.x % 32 == 0) bounds[search - 2 * first] = bound;
            }
            __syncthreads();
            for (i64 source = first; source < end; ++source) {
                const i64 begin = bounds[2 * (source - first)], stop = bounds[2 * (source - first) + 1];
                const T* values = call.template body<T>(source, row, 8);
                const u32* indices = call.template body<u32>(source, row, 8 + row.count * (i64)sizeof(T));
                if (begin < 0 || stop < begin) {
                    if (threadIdx.x == 0) call.malformed(source, segment);
                    continue;
                }
                for (i64 slot = begin + threadIdx.x; slot < stop; slot += blockDim.x) {
                    const i64 position = indices[slot];
                    const i64 previous = slot > begin ? (i64)indices[slot - 1] : low - 1;
                    if (position <= previous || position < low || position >= high)
                        call.malformed(source, segment);
                    else
                        total[position - low] += values[slot];
                }
                __syncthreads();
            }
        }
        __syncthreads();
        for (i64 i = low + threadIdx.x; i < high; i += blockDim.x)
            call.target[row.source + i] = call.scale == T(1) ? total[i - low] : total[i - low] * call.scale;
    }
};
