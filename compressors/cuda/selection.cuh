// The k-th largest of many numbers, and sums over a block: what the sparsifiers select with. Needs common.cuh.

#define BINS 2048
#define DIGIT 11    // bits
#define AT_ONCE 64  // bytes that a thread reads before it uses the first, unless it needs its registers

template <typename A> __device__ inline A fresh(const A& at) { return *(const volatile A*)&at; }

// Whether this block is the last of `num` to come here; to all threads. What the others wrote before can be read.
__device__ inline bool is_last(u32* tickets, i64 num) {
    __shared__ u32 last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(tickets, 1u) == (u32)(num - 1);
    __syncthreads();
    if (last) __threadfence();
    return last != 0;
}

// The bin in which the count from above reaches k, and how many of it that takes; to all threads.
__device__ inline void find_bin(const u32* histogram, i64 k, u32* bin, i64* rest) {
    __shared__ u32 found;
    __shared__ i64 left;
    __syncthreads();
    if (threadIdx.x < 32) {
        const int each = BINS / 32, top = BINS - 1 - each * (int)threadIdx.x;
        i64 mine = 0;
#pragma unroll 8
        for (int at = 0; at < each; ++at)  // every thread begins elsewhere: else all would ask the same bank
            mine += histogram[top - ((at + (int)threadIdx.x) & (each - 1))];
        i64 through = mine;
        for (int distance = 1; distance < 32; distance *= 2) {
            const i64 other = __shfl_up_sync(FULL, through, distance);
            if (threadIdx.x >= distance) through += other;
        }
        if (through >= k && through - mine < k) {
            i64 wanted = k - (through - mine);
            int at = top;
            while (histogram[at] < wanted) wanted -= histogram[at--];
            found = (u32)at;
            left = wanted;
        }
    }
    __syncthreads();
    *bin = found;
    *rest = left;
    __syncthreads();
}

// The k-th largest (1 <= k) of the values that the block's threads hand to `each`'s argument, and how many equal to it
// belong to the top k; to all threads. `histogram`: BINS words of shared memory; `counted`: of the leading digit
// already, by an earlier pass. As soon as at most `Room` values are left they are kept in shared memory: one block alone
// waits for every pass over the others.
template <typename B, int Room = 1, typename Each>
__device__ void kth_largest(const Each& each, i64 k, u32* histogram, bool counted, B* kth, i64* ties) {
    __shared__ B kept[Room];
    __shared__ u32 num_kept;
    const int width = 8 * sizeof(B);
    u64 prefix = 0;
    int shift = width;
    bool fits = false;
    while (shift > 0) {
        const int step = least(DIGIT, shift), above = shift;
        shift -= step;
        const int num_bins = 1 << step;
        const bool keeping = Room > 1 && !counted && !fits;
        if (!counted) {
            __syncthreads();
            for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) histogram[bin] = 0;
            if (keeping && threadIdx.x == 0) num_kept = 0;
            __syncthreads();
            const auto count = [&](u64 value) {
                if (above < width && value >> above != prefix >> above) return;
                atomicAdd(&histogram[(value >> shift) & (num_bins - 1)], 1u);
                if (!keeping) return;
                const u32 at = atomicAdd(&num_kept, 1u);
                if (at < Room) kept[at] = (B)value;
            };
            if (fits)
                for (u32 at = threadIdx.x; at < num_kept; at += blockDim.x) count((u64)kept[at]);
            else
                each(count);
        }
        counted = false;
        u32 bin;
        find_bin(histogram, k, &bin, &k);
        if (keeping) fits = num_kept <= Room;
        prefix |= (u64)bin << shift;
    }
    *kth = (B)prefix;
    *ties = k;
}

// For kth_largest: `num` values that any thread can read, N at a time, since the few threads there are wait for them.
template <typename B, int N, typename Values> struct EachOf {
    Values values;
    i64 num;

    template <typename Use> __device__ void operator()(const Use& use) const {
        for (i64 first = threadIdx.x; first < num; first += N * (i64)blockDim.x) {
            B some[N];
#pragma unroll
            for (int part = 0; part < N; ++part)
                some[part] = values(least(first + part * (i64)blockDim.x, num - 1));
#pragma unroll
            for (int part = 0; part < N; ++part)
                if (first + part * (i64)blockDim.x < num) use((u64)some[part]);
        }
    }
};
template <typename B, int N = AT_ONCE / sizeof(B), typename Values>
__device__ EachOf<B, N, Values> each_of(const Values& values, i64 num) {
    return {values, num};
}

// Bins of distances above the threshold, narrow near it, where the k-th largest is expected, and 1/64 (float64: 1/32)
// of the distance wide further up. The first are of one distance each.
template <typename B> struct Bin;
template <> struct Bin<u32> {
    static const u32 exact = 64;
    __device__ static u32 of(u32 distance) {
        if (distance < 64) return distance;
        const int exponent = 31 - __clz((int)distance);
        return (u32)(exponent - 5) << 6 | (distance >> (exponent - 6) & 63);
    }
};
template <> struct Bin<u64> {
    static const u32 exact = 32;
    __device__ static u32 of(u64 distance) {
        if (distance < 32) return (u32)distance;
        const int exponent = 63 - __clzll((i64)distance);
        return (u32)(exponent - 4) << 5 | (u32)(distance >> (exponent - 5) & 31);
    }
};

// Sums over the block of two numbers, and over the threads before this one; to all threads.
__device__ inline void block_scan(u32 above, u32 equal, i64* above_before, i64* equal_before, i64* above_all, i64* equal_all) {
    __shared__ u64 sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 mine = (u64)above << 32 | equal;  // each stays below 2^32
    u64 through = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 other = __shfl_up_sync(FULL, through, distance);
        if (lane >= distance) through += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    u64 before = through - mine, all = 0;
    for (int other = 0; other < WARPS; ++other) {
        before += other < warp ? sums[other] : 0;
        all += sums[other];
    }
    *above_before = (i64)(before >> 32);
    *equal_before = (i64)(u32)before;
    *above_all = (i64)(all >> 32);
    *equal_all = (i64)(u32)all;
}
