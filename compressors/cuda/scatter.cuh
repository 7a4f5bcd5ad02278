// How the sparsifiers decode. Needs common.cuh, slots.cuh and TILE, a divisor of a span.

#define SEARCHES 32  // rows whose slots are looked up together

// The first of `num` slots whose place is at least `wanted`, if places ascend; a warp looks at 32 at once.
__device__ inline i64 lower_bound(const u16* places, i64 num, i64 wanted) {
    const int lane = threadIdx.x % 32;
    i64 low = 0, high = num;
    while (low < high) {
        const i64 step = (high - low + 31) / 32;
        const i64 probe = least(low + (lane + 1) * step, high) - 1;
        const u32 less = __ballot_sync(FULL, (i64)places[probe] < wanted);
        if (less == FULL) return high;
        const int first = __ffs((int)~less) - 1;
        high = least(low + (first + 1) * step, high) - 1;
        low += first * step;
    }
    return low;
}

// A tile's bound among a row's slots: where those of its element `edge` begin, which lies in the span that begins with
// element `low`, or where the span ends. -1 if the row says what cannot be. All threads of a warp come with the same.
template <typename T>
__device__ i64 bound_of(const Decode<T>& call, const Row& row, i64 source, i64 low, i64 edge) {
    const u32* prefix = call.template body<u32>(source, row);
    const u32* ends = call.template body<u32>(source, row, ends_at(row.count, sizeof(T)));
    const i64 span = low / SPAN, num = prefix[0];
    const i64 begin = span > 0 ? (i64)ends[span - 1] : 0;
    const i64 stop = span < num_ends(row.numel) ? (i64)ends[span] : num;
    if (num > row.count || prefix[1] != 0 || stop < begin || stop > num) return -1;
    if (edge == row.numel || edge == (span + 1) * SPAN) return stop;
    const u16* places = call.template body<u16>(source, row, places_at(row.numel, row.count, sizeof(T)));
    return begin + lower_bound(places + begin, stop - begin, edge % SPAN);
}

// A tile is summed in shared memory: rows in order, the slots of a row side by side. Every index is checked, in the
// tile and ascending; one tile's bound is the next one's, so that a row passes only if all its indices are good.
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
                const i64 bound = bound_of(call, row, search / 2, low, search % 2 ? high : low);
                if (threadIdx.x % 32 == 0) bounds[search - 2 * first] = bound;
            }
            __syncthreads();
            for (i64 source = first; source < end; ++source) {
                const i64 begin = bounds[2 * (source - first)], stop = bounds[2 * (source - first) + 1];
                const T* values = call.template body<T>(source, row, 8);
                const u16* places =
                    call.template body<u16>(source, row, places_at(row.numel, row.count, sizeof(T)));
                if (begin < 0 || stop < begin) {
                    if (threadIdx.x == 0) call.malformed(source, segment);
                    continue;
                }
                for (i64 slot = begin + threadIdx.x; slot < stop; slot += blockDim.x) {
                    const i64 position = (i64)places[slot] - low % SPAN;  // in the tile
                    const i64 previous = slot > begin ? (i64)places[slot - 1] - low % SPAN : -1;
                    if (position <= previous || position < 0 || position >= high - low)
                        call.malformed(source, segment);
                    else
                        total[position] += values[slot];
                }
                __syncthreads();
            }
        }
        __syncthreads();
        for (i64 i = low + threadIdx.x; i < high; i += blockDim.x)
            call.target[row.source + i] = call.scale == T(1) ? total[i - low] : total[i - low] * call.scale;
    }
};
