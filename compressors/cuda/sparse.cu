// Top-k and DGC. Format: espresso/compressors/sparse.py; twins: espresso/cpu_offload/sparse.py, sparse_kernels.py.
//
// The pass over memory is the host's: a sample sets a threshold, one pass writes q to the residual and collects what
// passes, and the top k of the few that passed are sent and cleared in the residual. Six launches for all segments:
//
//   gather     tiles of samples   magnitudes of the sample
//   threshold  segments           its rank-th largest
//   filter     tiles              q to the residual; candidates to the tile's place, in order; their magnitudes to the
//                                 segment's pool, in any order: selection does not look at it
//   select     segments           the k-th largest of the pool, and how many equal to it belong to the top k. Where too
//                                 few passed, this block alone lowers the threshold and looks at the segment again
//   count      tiles              candidates above the cut and on it; the segment's last block adds them up
//   emit       tiles              body and residual
//
// Magnitudes are compared as unsigned integers; infinities and NaNs lie on top and so are always among the candidates.

#include "common.cuh"

#define TILE 4096
#define RUN 16
#define SELECT_THREADS 1024
#define BINS 2048

// How a segment is sampled. espresso.compressors.cuda.sparse writes it.
struct Sampling {
    i64 num_runs;
    i64 rank;
    i64 first;  // of the segment's samples, in the buffer of all samples
};

struct State {
    u64 threshold;
    u64 cut;  // sent: above the cut, and the first `ties` on it
    i64 ties;
    i64 above;  // candidates above the cut, and on it
    i64 equal;
    u32 found;
    u32 ticket;
};

template <typename T> struct Candidates {
    typedef typename Number<T>::Bits Bits;
    State* states;
    u32* found;  // of every tile
    u32* above;  // of every tile; then of all tiles of its segment before it
    u32* equal;
    u32* index;  // of tile t from t * TILE on
    Bits* value;
    Bits* pool;  // of a segment from first_tile * TILE on
};

#define CANDIDATE_PARAMETERS(T) \
    State *states, u32 *found, u32 *above, u32 *equal, u32 *index, Number<T>::Bits *value, Number<T>::Bits *pool
#define CANDIDATES(T) \
    Candidates<T> { states, found, above, equal, index, value, pool }

// The k-th largest of `num` values (1 <= k <= num) and how many equal to it belong to the top k; to all threads.
template <typename B, typename Values>
__device__ void kth_largest(const Values& values, i64 num, i64 k, B* kth, i64* ties) {
    __shared__ u32 histogram[BINS];
    __shared__ u64 found;
    __shared__ i64 left;
    const int width = 8 * sizeof(B);
    u64 prefix = 0;
    int shift = width;
    while (shift > 0) {
        const int step = least(11, shift);
        shift -= step;
        const int num_bins = 1 << step;
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) histogram[bin] = 0;
        __syncthreads();
#pragma unroll 4
        for (i64 i = threadIdx.x; i < num; i += blockDim.x) {
            const u64 value = values(i);
            if (shift + step >= width || value >> (shift + step) == prefix >> (shift + step))
                atomicAdd(&histogram[(value >> shift) & (num_bins - 1)], 1u);
        }
        __syncthreads();
        if (threadIdx.x < 32) {  // the bin in which the count from above reaches k
            const int each = BINS / 32, top = BINS - 1 - each * (int)threadIdx.x;
            i64 mine = 0;
            for (int bin = 0; bin < each; ++bin) mine += histogram[top - bin];
            i64 through = mine;
            for (int distance = 1; distance < 32; distance *= 2) {
                const i64 other = __shfl_up_sync(FULL, through, distance);
                if (threadIdx.x >= distance) through += other;
            }
            if (through >= k && through - mine < k) {
                i64 rest = k - (through - mine);
                int bin = top;
                while (histogram[bin] < rest) rest -= histogram[bin--];
                found = prefix | (u64)bin << shift;
                left = rest;
            }
        }
        __syncthreads();
        prefix = found;
        k = left;
        __syncthreads();
    }
    *kth = (B)prefix;
    *ties = k;
}

template <typename T>
__device__ void gather_sample(
    const Encode<T>& call, const Sampling* samplings, const Tile* sample_tiles, i64 num_sample_tiles, u64 step,
    typename Number<T>::Bits* sample
) {
    if (blockIdx.x >= num_sample_tiles) return;
    const Tile tile = sample_tiles[blockIdx.x];  // low: a position in the segment's sample
    const Row row = call.rows[tile.segment];
    const Sampling how = samplings[tile.segment];
    const i64 stride = largest(row.numel / how.num_runs, (i64)RUN);
    const u64 salt = step ^ (u64)row.hash;
    for (i64 at = tile.low + threadIdx.x; at < tile.low + TILE; at += blockDim.x) {
        const i64 run = at / RUN;
        i64 i = run * stride + at % RUN;
        if (stride > RUN) {
            if (run >= how.num_runs) break;
            i += (i64)(mix64(salt + (u64)run) % (u64)(stride - RUN));
        } else if (i >= row.numel) {
            break;
        }
        sample[how.first + at] = magnitude_of(call.q(row, i));
    }
}

// At least 1, so that zeros never pass; or the compressor's own, fixed.
template <typename T>
__device__ void sample_threshold(
    const Encode<T>& call, const Sampling* samplings, const typename Number<T>::Bits* sample, State* states, T fixed
) {
    typedef typename Number<T>::Bits Bits;
    const Row row = call.rows[blockIdx.x];
    State& state = states[blockIdx.x];
    if (threadIdx.x == 0) {
        state.found = 0;
        state.ticket = 0;
        state.threshold = fixed > T(0) ? bits_of(fixed) : (Bits)1;
    }
    if (row.raw || fixed > T(0)) return;
    const Sampling how = samplings[blockIdx.x];
    const i64 taken = row.numel / how.num_runs > RUN ? how.num_runs * RUN : row.numel;
    if (how.rank > taken) return;
    const Bits* mine = sample + how.first;
    Bits kth;
    i64 ties;
    kth_largest<Bits>([=](i64 i) { return (u64)mine[i]; }, taken, how.rank, &kth, &ties);
    if (threadIdx.x == 0) state.threshold = largest(kth, (Bits)1);
}

// Collect a tile's candidates in order and write q to the residual; returns whether something is not finite.
template <int NUM_WARPS, typename T>
__device__ bool filter_tile(
    const Encode<T>& call, const Candidates<T>& to, const Row& row, State& state, i64 tile, i64 low,
    typename Number<T>::Bits threshold
) {
    typedef typename Number<T>::Bits Bits;
    const int ROWS = TILE / 32 / NUM_WARPS;
    __shared__ u32 counts[NUM_WARPS];
    __shared__ u32 base;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 high = least(low + TILE, row.numel);
    Bits bits[ROWS];
    u32 masks[ROWS];
    u32 mine = 0;
    bool bad = false;
#pragma unroll
    for (int part = 0; part < ROWS; ++part) {
        const i64 i = low + (warp * ROWS + part) * 32 + lane;
        bits[part] = i < high ? bits_of(call.q(row, i)) : 0;
    }
#pragma unroll
    for (int part = 0; part < ROWS; ++part) {
        const i64 i = low + (warp * ROWS + part) * 32 + lane;
        const Bits magnitude = bits[part] & Number<T>::magnitude;
        if (i < high) call.keep(row, i, number_of(bits[part]));
        bad = bad || magnitude >= Number<T>::infinity;
        masks[part] = __ballot_sync(FULL, i < high && magnitude >= threshold);
        mine += __popc(masks[part]);
    }
    __syncthreads();
    if (lane == 0) counts[warp] = mine;
    __syncthreads();
    u32 at = 0, total = 0;
    for (int other = 0; other < NUM_WARPS; ++other) {
        at += other < warp ? counts[other] : 0;
        total += counts[other];
    }
    if (threadIdx.x == 0) {
        to.found[tile] = total;
        base = atomicAdd(&state.found, total);
    }
    __syncthreads();
    Bits* pool = to.pool + row.first_tile * TILE + base;
#pragma unroll
    for (int part = 0; part < ROWS; ++part) {
        if (masks[part] >> lane & 1) {
            const u32 place = at + __popc(masks[part] & ((1u << lane) - 1));
            to.index[tile * TILE + place] = (u32)(low + (warp * ROWS + part) * 32 + lane);
            to.value[tile * TILE + place] = bits[part];
            pool[place] = bits[part] & Number<T>::magnitude;
        }
        at += __popc(masks[part]);
    }
    return bad;
}

template <typename T> __device__ void filter(const Encode<T>& call, const Candidates<T>& to) {
    typedef typename Number<T>::Bits Bits;
    if (blockIdx.x >= call.num_tiles) return;
    const Tile tile = call.tiles[blockIdx.x];
    const Row row = call.rows[tile.segment];
    if (row.raw) return;
    State& state = to.states[tile.segment];
    bool bad = filter_tile<WARPS>(call, to, row, state, (i64)blockIdx.x, tile.low, (Bits)state.threshold);
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicOr(call.sync + 1, 1u);
}

// How many of the segment have at least this magnitude; to all threads.
template <typename T>
__device__ i64 count_from(const Encode<T>& call, const Row& row, typename Number<T>::Bits threshold) {
    __shared__ u32 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    u32 mine = 0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < row.numel; i += blockDim.x) mine += magnitude_of(call.q(row, i)) >= threshold;
    for (int distance = 16; distance; distance /= 2) mine += __shfl_down_sync(FULL, mine, distance);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, mine);
    __syncthreads();
    const i64 all = total;
    __syncthreads();
    return all;
}

template <typename T>
__device__ void select(const Encode<T>& call, const Candidates<T>& to, double enough, int attempts, int exact) {
    typedef typename Number<T>::Bits Bits;
    const Row row = call.rows[blockIdx.x];
    if (row.raw) return;
    State& state = to.states[blockIdx.x];
    Bits threshold = (Bits)state.threshold;
    i64 found = state.found, ties;
    int attempt = 0;
    for (; !((double)found >= enough * (double)row.count || threshold <= 1); ++attempt) {
        if (attempt < attempts) {
            threshold = largest(bits_of(number_of(threshold) * T(0.8)), (Bits)1);
        } else if (exact && attempt == attempts) {
            kth_largest<Bits>(
                [&](i64 i) { return (u64)magnitude_of(call.q(row, i)); }, row.numel, row.count, &threshold, &ties
            );
            threshold = largest(threshold, (Bits)1);
        } else {
            break;
        }
        found = count_from(call, row, threshold);
    }
    if (attempt) {
        if (threadIdx.x == 0) state.found = 0;
        __syncthreads();
        for (i64 tile = row.first_tile; tile < row.end_tile; ++tile)
            filter_tile<SELECT_THREADS / 32>(call, to, row, state, tile, (tile - row.first_tile) * TILE, threshold);
        __syncthreads();
    }
    Bits cut = 0;
    ties = found;
    if (found > row.count) {
        const Bits* pool = to.pool + row.first_tile * TILE;
        kth_largest<Bits>([=](i64 i) { return (u64)pool[i]; }, found, row.count, &cut, &ties);
    }
    if (threadIdx.x == 0) {
        state.cut = cut;
        state.ties = ties;
    }
}

// Sum over the block, and over the threads before this one; to all threads. `sums`: a word for every warp.
__device__ inline u32 block_scan(u32 mine, u32* sums, u32* total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    u32 through = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(FULL, through, distance);
        if (lane >= distance) through += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    u32 before = through - mine;
    *total = 0;
    for (int other = 0; other < num_warps; ++other) {
        before += other < warp ? sums[other] : 0;
        *total += sums[other];
    }
    return before;
}

template <typename T> __device__ void count(const Encode<T>& call, const Candidates<T>& to) {
    typedef typename Number<T>::Bits Bits;
    __shared__ u32 sums[WARPS];
    __shared__ u32 last;
    if (blockIdx.x >= call.num_tiles) return;
    const i64 segment = call.tiles[blockIdx.x].segment;
    const Row row = call.rows[segment];
    if (row.raw) return;
    State& state = to.states[segment];
    const Bits cut = (Bits)state.cut;
    u32 above = 0, equal = 0, all_above, all_equal;
    for (u32 i = threadIdx.x; i < to.found[blockIdx.x]; i += blockDim.x) {
        const Bits magnitude = to.value[(i64)blockIdx.x * TILE + i] & Number<T>::magnitude;
        above += magnitude > cut;
        equal += magnitude == cut;
    }
    block_scan(above, sums, &all_above);
    block_scan(equal, sums, &all_equal);
    if (threadIdx.x == 0) {
        to.above[blockIdx.x] = all_above;
        to.equal[blockIdx.x] = all_equal;
        __threadfence();
        last = atomicAdd(&state.ticket, 1u) == (u32)(row.end_tile - row.first_tile - 1);
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    u32 above_before = 0, equal_before = 0;  // in tiles already added up
    for (i64 first = row.first_tile; first < row.end_tile; first += blockDim.x) {
        const i64 tile = first + threadIdx.x;
        const bool inside = tile < row.end_tile;
        // volatile: past the first-level cache, which may hold a neighbour's line from before
        const u32 tile_above = inside ? ((volatile u32*)to.above)[tile] : 0;
        const u32 tile_equal = inside ? ((volatile u32*)to.equal)[tile] : 0;
        above = block_scan(tile_above, sums, &all_above);
        equal = block_scan(tile_equal, sums, &all_equal);
        if (inside) {
            to.above[tile] = above_before + above;
            to.equal[tile] = equal_before + equal;
        }
        above_before += all_above;
        equal_before += all_equal;
    }
    if (threadIdx.x == 0) {
        state.above = above_before;
        state.equal = equal_before;
    }
}

template <typename T> struct Sparse : Plain {
    Candidates<T> from;

    __device__ explicit Sparse(const Candidates<T>& from_) : from(from_) {}

    __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        typedef typename Number<T>::Bits Bits;
        __shared__ u32 sums[WARPS];
        const i64 tile = blockIdx.x;
        const State state = from.states[call.tiles[tile].segment];
        Bits* values = call.template body<Bits>(row, 8);
        u32* indices = call.template body<u32>(row, 8 + row.count * (i64)sizeof(T));
        i64 above = from.above[tile], equal = from.equal[tile];
        const u32 num = from.found[tile];
        for (u32 first = 0; first < num; first += blockDim.x) {
            const u32 i = first + threadIdx.x;
            const Bits value = i < num ? from.value[tile * TILE + i] : 0;
            const Bits magnitude = value & Number<T>::magnitude;
            const u32 is_above = i < num && magnitude > state.cut, is_equal = i < num && magnitude == state.cut;
            u32 all_above, all_equal;
            const i64 above_here = above + block_scan(is_above, sums, &all_above);
            const i64 equal_here = equal + block_scan(is_equal, sums, &all_equal);
            if (is_above || (is_equal && equal_here < state.ties)) {
                const i64 slot = above_here + least(equal_here, state.ties);
                const u32 index = from.index[tile * TILE + i];
                values[slot] = value;
                indices[slot] = index;
                call.keep(row, index, T(0));
            }
            above += all_above;
            equal += all_equal;
        }
        if (high == row.numel) {  // the last tile: the count, and slots without a number
            const i64 sent = state.above + least(state.equal, state.ties);
            if (threadIdx.x == 0) {
                u32* prefix = call.template body<u32>(row);
                prefix[0] = (u32)sent;
                prefix[1] = 0;
            }
            for (i64 slot = sent + threadIdx.x; slot < row.count; slot += blockDim.x) {
                values[slot] = 0;
                indices[slot] = 0;
            }
        }
        return false;  // filter has looked
    }
};

// -- decode --------------------------------------------------------------------------------------------------------

// The first slot whose index is at least `wanted`, if the indices ascend.
__device__ inline i64 lower_bound(const u32* indices, i64 num, i64 wanted) {
    i64 low = 0, high = num;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if ((i64)indices[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// A tile is summed in shared memory: rows in order, the slots of a row side by side. Every index is checked, in the
// tile and ascending; neighbouring tiles search for the same bound, so a row passes only if all its indices are good.
struct Scatter {
    template <typename T>
    __device__ void decode(const Decode<T>& call, const Row& row, i64 segment, i64 low, i64 high) const {
        __shared__ T total[TILE];
        __shared__ i64 bounds[2];
        for (int i = threadIdx.x; i < TILE; i += blockDim.x) total[i] = T(0);
        for (i64 source = 0; source < call.num_rows; ++source) {
            const u32* prefix = call.template body<u32>(source, row);
            const i64 num = prefix[0];
            const bool wrong = num > row.count || prefix[1] != 0;
            const T* values = call.template body<T>(source, row, 8);
            const u32* indices = call.template body<u32>(source, row, 8 + row.count * (i64)sizeof(T));
            __syncthreads();
            if (threadIdx.x < 2 && !wrong) bounds[threadIdx.x] = lower_bound(indices, num, threadIdx.x ? high : low);
            __syncthreads();
            if (wrong || bounds[1] < bounds[0] || (high == row.numel && bounds[1] != num)) {
                if (threadIdx.x == 0) call.malformed(source, segment);
                continue;
            }
            for (i64 slot = bounds[0] + threadIdx.x; slot < bounds[1]; slot += blockDim.x) {
                const i64 position = indices[slot];
                const i64 previous = slot > bounds[0] ? (i64)indices[slot - 1] : low - 1;
                if (position <= previous || position < low || position >= high)
                    call.malformed(source, segment);
                else
                    total[position - low] += values[slot];
            }
        }
        __syncthreads();
        for (i64 i = low + threadIdx.x; i < high; i += blockDim.x)
            call.target[row.source + i] = call.scale == T(1) ? total[i - low] : total[i - low] * call.scale;
    }
};

#define SPARSE_KERNELS(T, suffix)                                                                                  \
    KERNEL(gather_##suffix, THREADS,                                                                               \
           (ENCODE_PARAMETERS(T), const Sampling* samplings, const Tile* sample_tiles, i64 num_sample_tiles, u64 step, \
            Number<T>::Bits* sample),                                                                              \
           gather_sample(ENCODE(T), samplings, sample_tiles, num_sample_tiles, step, sample))                      \
    KERNEL(threshold_##suffix, SELECT_THREADS,                                                                     \
           (ENCODE_PARAMETERS(T), const Sampling* samplings, const Number<T>::Bits* sample, State* states, T fixed), \
           sample_threshold(ENCODE(T), samplings, sample, states, fixed))                                          \
    KERNEL(filter_##suffix, THREADS, (ENCODE_PARAMETERS(T), CANDIDATE_PARAMETERS(T)),                              \
           filter(ENCODE(T), CANDIDATES(T)))                                                                       \
    KERNEL(select_##suffix, SELECT_THREADS,                                                                        \
           (ENCODE_PARAMETERS(T), CANDIDATE_PARAMETERS(T), double enough, int attempts, int exact),                \
           select(ENCODE(T), CANDIDATES(T), enough, attempts, exact))                                              \
    KERNEL(count_##suffix, THREADS, (ENCODE_PARAMETERS(T), CANDIDATE_PARAMETERS(T)), count(ENCODE(T), CANDIDATES(T))) \
    KERNEL(emit_##suffix, THREADS, (ENCODE_PARAMETERS(T), CANDIDATE_PARAMETERS(T)),                                \
           encode_tile(ENCODE(T), Sparse<T>(CANDIDATES(T))))                                                       \
    KERNEL(decode_##suffix, THREADS, (DECODE_PARAMETERS(T)), decode_tile(DECODE(T), Scatter()))

SPARSE_KERNELS(float, f32)
SPARSE_KERNELS(double, f64)
