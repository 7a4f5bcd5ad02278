// What is sent by sparsifiers of a sampled threshold, up to the slots. Needs common.cuh, selection.cuh and TILE. Twin:
// espresso/cpu_offload/sparse.py.
//
// The pass over memory is the host's: a sample sets a threshold, one pass writes q to the residual and collects what
// passes, and the top k of the few that passed are sent and cleared in the residual. Four launches for all segments:
//
//   sample  tiles of samples  magnitudes of the sample, and how many have which leading bits; the segment's last block
//                             finds the rank-th largest
//   filter  tiles             q to the residual; candidates to the tile's place, in order, and how many lie how far above
//                             the threshold; the segment's last block finds the bin that the k-th largest lies in
//   count   tiles             candidates above the bin, and a list of those in it; the segment's last block finds the k-th
//                             largest among them, and what every tile sends
//   emit    tiles             body and residual
//
// A segment of one tile needs only the last: a thread block holds all of it. Where too few passed, the last block of
// `filter` alone lowers the threshold and looks at the segment again: slow, and rare.
//
// Magnitudes are compared as unsigned integers; infinities and NaNs lie on top and so are always among the candidates.
// What blocks leave for the last of them is read past the first-level cache, which may hold an older line. States and
// histograms are zero between calls.

#define ROWS (TILE / THREADS)  // elements of a thread
#define RUN 16
#define SAMPLE_THREADS 1024
#define SAMPLES (TILE / SAMPLE_THREADS)
#define NO_BIN 0xffffffffu

// How a segment is sampled. espresso.compressors.cuda.sparse writes it. Zero where the segment is raw or has one tile.
struct Sampling {
    i64 num_runs;
    i64 rank;
    i64 first;      // of the segment's samples, in the buffer of all samples
    i64 num_tiles;  // of samples
    i64 histogram;  // which of the histograms is the segment's
};

struct State {
    u64 threshold;
    u64 cut;  // sent: above the cut, and the first `ties` on it
    i64 ties;
    i64 above;  // candidates above the cut, and on it
    i64 equal;
    i64 rest;    // how many of the bin belong to the top k
    u32 bin;     // or NO_BIN: all candidates are sent
    u32 found;   // candidates
    u32 listed;  // in the bin
    u32 tickets[3];
};

template <typename T> struct Candidates {
    typedef typename Number<T>::Bits Bits;
    const Sampling* samplings;
    State* states;
    u32* histograms;
    u32* found;  // of every tile
    u32* above;  // of every tile; then of all tiles of its segment before it
    u32* equal;
    u32* index;  // of tile t from t * TILE on
    Bits* value;
    u32* list;  // of a segment from first_tile * TILE on: where in `index` and `value` a candidate lies

    __device__ u32* histogram(i64 segment) const { return histograms + samplings[segment].histogram * BINS; }
};

#define CANDIDATE_PARAMETERS(T)                                                                               \
    const Sampling *samplings, State *states, u32 *histograms, u32 *found, u32 *above, u32 *equal, u32 *index, \
        Number<T>::Bits *value, u32 *list
#define CANDIDATES(T) \
    Candidates<T> { samplings, states, histograms, found, above, equal, index, value, list }

// Where a segment's histogram has a bin: many thread blocks add to neighbours, which lie in different cache lines.
__device__ inline u32 apart(u32 bin) { return bin % 64 * (BINS / 64) + bin / 64; }

__device__ inline bool is_small(const Row& row) { return row.end_tile - row.first_tile == 1; }

// -- sample --------------------------------------------------------------------------------------------------------

template <typename T>
__device__ void sample_tile(
    const Encode<T>& call, const Candidates<T>& to, const Tile* sample_tiles, i64 num_sample_tiles, u64 step,
    typename Number<T>::Bits* sample
) {
    typedef typename Number<T>::Bits Bits;
    const int shift = 8 * sizeof(Bits) - DIGIT;
    __shared__ u32 histogram[BINS];
    if (blockIdx.x >= num_sample_tiles) return;
    const Tile tile = sample_tiles[blockIdx.x];  // low: a position in the segment's sample
    const Row row = call.rows[tile.segment];
    const Sampling how = to.samplings[tile.segment];
    const i64 stride = largest(row.numel / how.num_runs, (i64)RUN);
    const i64 taken = stride > RUN ? how.num_runs * RUN : row.numel;
    const u64 salt = step ^ (u64)row.hash;
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) histogram[bin] = 0;
    Bits some[SAMPLES];
#pragma unroll
    for (int part = 0; part < SAMPLES; ++part) {
        const i64 at = tile.low + part * SAMPLE_THREADS + threadIdx.x, run = at / RUN;
        i64 i = run * stride + at % RUN;
        if (stride > RUN) i += (i64)(mix64(salt + (u64)run) % (u64)(stride - RUN));
        some[part] = at < taken ? magnitude_of(call.q(row, i)) : 0;
    }
    __syncthreads();
    Bits* mine = sample + how.first;
#pragma unroll
    for (int part = 0; part < SAMPLES; ++part) {
        const i64 at = tile.low + part * SAMPLE_THREADS + threadIdx.x;
        if (at < taken) {
            mine[at] = some[part];
            atomicAdd(&histogram[some[part] >> shift], 1u);
        }
    }
    __syncthreads();
    u32* counts = to.histogram(tile.segment);
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
        if (histogram[bin]) atomicAdd(counts + bin, histogram[bin]);
    State& state = to.states[tile.segment];
    if (!is_last(&state.tickets[0], how.num_tiles)) return;
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        histogram[bin] = fresh(counts[bin]);
        counts[bin] = 0;
    }
    Bits kth = 0;
    i64 ties;
    if (how.rank <= taken)
        kth_largest<Bits, TILE>(each_of<Bits>([=](i64 i) { return fresh(mine[i]); }, taken), how.rank, histogram, true,
                                &kth, &ties);
    if (threadIdx.x == 0) {
        state.threshold = largest(kth, (Bits)1);  // zeros never pass
        state.tickets[0] = 0;
    }
}

// -- filter --------------------------------------------------------------------------------------------------------

// Collect a tile's candidates in order and write q to the residual; returns whether something is not finite.
// `histogram`: BINS words of shared memory.
template <typename T>
__device__ bool filter_tile(
    const Encode<T>& call, const Candidates<T>& to, const Row& row, i64 segment, i64 tile, i64 low,
    typename Number<T>::Bits threshold, u32* histogram
) {
    typedef typename Number<T>::Bits Bits;
    __shared__ u32 counts[WARPS];
    __shared__ u16 places[TILE];  // of a warp's candidates, among its elements
    const int at_once = Number<T>::at_once, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 high = least(low + TILE, row.numel), begin = low + warp * (ROWS * 32) + lane;
    u32 kept = 0, mine = 0;  // lane p keeps what passes of row p
    bool bad = false;
#pragma unroll 1
    for (int first = 0; first < ROWS; first += at_once) {
        Bits bits[at_once];
#pragma unroll
        for (int part = 0; part < at_once; ++part) {
            const i64 i = begin + (first + part) * 32;
            bits[part] = i < high ? bits_of(call.q(row, i)) : 0;
        }
#pragma unroll
        for (int part = 0; part < at_once; ++part) {
            const i64 i = begin + (first + part) * 32;
            const Bits magnitude = bits[part] & Number<T>::magnitude;
            if (i < high) call.keep(row, i, number_of(bits[part]));
            bad = bad || magnitude >= Number<T>::infinity;
            const u32 mask = __ballot_sync(FULL, i < high && magnitude >= threshold);
            kept = lane == first + part ? mask : kept;
            mine += __popc(mask);
        }
    }
    __syncthreads();
    if (lane == 0) counts[warp] = mine;
    __syncthreads();
    u32 at = 0, total = 0;
    for (int other = 0; other < WARPS; ++other) {
        at += other < warp ? counts[other] : 0;
        total += counts[other];
    }
    if (threadIdx.x == 0) {
        to.found[tile] = total;
        atomicAdd(&to.states[segment].found, total);
    }
    u32* bins = to.histogram(segment);
    const bool many = total > TILE / 4;  // then they are counted here first
    if (many) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) histogram[bin] = 0;
        __syncthreads();
    }
    u16* where = places + warp * (ROWS * 32);
    u32 done = 0;
    for (int part = 0; part < ROWS; ++part) {
        const u32 mask = __shfl_sync(FULL, kept, part);
        if (mask >> lane & 1) where[done + __popc(mask & ((1u << lane) - 1))] = (u16)(part * 32 + lane);
        done += __popc(mask);
    }
    __syncwarp();
    for (u32 nth = lane; nth < mine; nth += 32) {
        const i64 i = begin - lane + where[nth], place = tile * TILE + at + nth;
        const Bits value = bits_of(call.q(row, i));  // again: held in registers over the barrier, it would spill them
        to.index[place] = (u32)i;
        to.value[place] = value;
        const u32 bin = Bin<Bits>::of((value & Number<T>::magnitude) - threshold);
        atomicAdd(many ? histogram + bin : bins + apart(bin), 1u);
    }
    if (many) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
            if (histogram[bin]) atomicAdd(bins + apart(bin), histogram[bin]);
    }
    return bad;
}

// How many of the segment have at least this magnitude; to all threads.
template <typename T>
__device__ i64 count_from(const Encode<T>& call, const Row& row, typename Number<T>::Bits threshold) {
    typedef typename Number<T>::Bits Bits;
    __shared__ u32 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    u32 mine = 0;
    const auto magnitude = [&](i64 i) { return magnitude_of(call.q(row, i)); };
    each_of<Bits, Number<T>::at_once / 2>(magnitude, row.numel)([&](u64 value) { mine += value >= threshold; });
    atomicAdd(&total, mine);
    __syncthreads();
    const i64 all = total;
    __syncthreads();
    return all;
}

template <typename T>
__device__ void filter(const Encode<T>& call, const Candidates<T>& to, T fixed, double enough, int attempts, int exact) {
    typedef typename Number<T>::Bits Bits;
    __shared__ u32 histogram[BINS];
    if (blockIdx.x >= call.num_tiles) return;
    const Tile tile = call.tiles[blockIdx.x];
    const Row row = call.rows[tile.segment];
    if (row.raw || is_small(row)) return;
    State& state = to.states[tile.segment];
    Bits threshold = fixed > T(0) ? bits_of(fixed) : (Bits)state.threshold;
    const bool bad = filter_tile(call, to, row, tile.segment, (i64)blockIdx.x, tile.low, threshold, histogram);
    if (bad) atomicOr(call.sync + 1, 1u);
    if (!is_last(&state.tickets[1], row.end_tile - row.first_tile)) return;
    i64 found = fresh(state.found), rest = 0;
    u32* bins = to.histogram(tile.segment);
    int attempt = 0;
    for (; !((double)found >= enough * (double)row.count || threshold <= 1); ++attempt) {
        if (attempt < attempts) {
            threshold = largest(bits_of(number_of(threshold) * T(0.8)), (Bits)1);
        } else if (exact && attempt == attempts) {
            kth_largest<Bits>(each_of<Bits, Number<T>::at_once / 2>(
                                  [&](i64 i) { return magnitude_of(call.q(row, i)); }, row.numel),
                              row.count, histogram, false, &threshold, &rest);
            threshold = largest(threshold, (Bits)1);
        } else {
            break;
        }
        found = count_from(call, row, threshold);
    }
    if (attempt) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) bins[bin] = 0;
        __threadfence();
        __syncthreads();
        for (i64 again = row.first_tile; again < row.end_tile; ++again)
            filter_tile(call, to, row, tile.segment, again, (again - row.first_tile) * TILE, threshold,
                        histogram);
        __threadfence();
        __syncthreads();
    }
    u32 bin = NO_BIN;
    for (int at = threadIdx.x; at < BINS; at += blockDim.x) {
        histogram[at] = fresh(bins[apart(at)]);
        bins[apart(at)] = 0;
    }
    if (found > row.count) find_bin(histogram, row.count, &bin, &rest);
    __syncthreads();  // all have read state.found
    if (threadIdx.x == 0) {
        state.threshold = threshold;
        state.bin = bin;
        state.rest = rest;
        state.found = 0;
        state.tickets[1] = 0;
    }
}

// -- count ---------------------------------------------------------------------------------------------------------

// Turns the tiles' counts into those of all tiles before; tiles of a thread lie side by side.
template <typename T> __device__ void add_up(const Candidates<T>& to, const Row& row, State& state) {
    i64 above_done = 0, equal_done = 0, above_before, equal_before, above_all, equal_all;
    for (i64 first = row.first_tile; first < row.end_tile; first += ROWS * THREADS) {
        const i64 mine = first + ROWS * (i64)threadIdx.x;
        u32 above[ROWS], equal[ROWS], above_sum = 0, equal_sum = 0;
#pragma unroll
        for (int part = 0; part < ROWS; ++part) {
            const bool inside = mine + part < row.end_tile;
            above[part] = inside ? fresh(to.above[mine + part]) : 0;
            equal[part] = inside ? fresh(to.equal[mine + part]) : 0;
        }
#pragma unroll
        for (int part = 0; part < ROWS; ++part) {
            above_sum += above[part];
            equal_sum += equal[part];
        }
        block_scan(above_sum, equal_sum, &above_before, &equal_before, &above_all, &equal_all);
        above_before += above_done;
        equal_before += equal_done;
#pragma unroll
        for (int part = 0; part < ROWS; ++part) {
            if (mine + part < row.end_tile) {
                to.above[mine + part] = (u32)above_before;
                to.equal[mine + part] = (u32)equal_before;
            }
            above_before += above[part];
            equal_before += equal[part];
        }
        above_done += above_all;
        equal_done += equal_all;
    }
    if (threadIdx.x == 0) {
        state.above = above_done;
        state.equal = equal_done;
    }
}

template <typename T> __device__ void count(const Encode<T>& call, const Candidates<T>& to) {
    typedef typename Number<T>::Bits Bits;
    __shared__ u32 histogram[BINS];
    __shared__ u32 totals[2];
    if (blockIdx.x >= call.num_tiles) return;
    const i64 segment = call.tiles[blockIdx.x].segment, tile = blockIdx.x;
    const Row row = call.rows[segment];
    if (row.raw || is_small(row)) return;
    State& state = to.states[segment];
    const Bits threshold = (Bits)state.threshold;
    const u32 bin = state.bin, found = to.found[tile];
    const bool is_exact = bin < Bin<Bits>::exact, listing = bin != NO_BIN && !is_exact;
    const u32 lane = threadIdx.x % 32;
    u32* list = to.list + row.first_tile * TILE;
    if (threadIdx.x < 2) totals[threadIdx.x] = 0;
    __syncthreads();
    u32 above = 0, inside = 0;
    for (u32 first = 0; first < found; first += blockDim.x) {
        const u32 i = first + threadIdx.x;
        const Bits magnitude = i < found ? to.value[tile * TILE + i] & Number<T>::magnitude : threshold;
        const u32 mine = Bin<Bits>::of(magnitude - threshold);
        const bool is_above = i < found && (bin == NO_BIN || mine > bin), is_inside = i < found && mine == bin;
        const u32 mask = __ballot_sync(FULL, is_inside);
        above += __popc(__ballot_sync(FULL, is_above));
        inside += __popc(mask);
        if (listing && mask) {
            u32 place = 0;
            if (lane == 0) place = atomicAdd(&state.listed, (u32)__popc(mask));
            place = __shfl_sync(FULL, place, 0) + __popc(mask & ((1u << lane) - 1));
            if (is_inside) list[place] = (u32)((tile - row.first_tile) * TILE + i);
        }
    }
    if (lane == 0) {
        atomicAdd(&totals[0], above);
        atomicAdd(&totals[1], inside);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        to.above[tile] = totals[0];
        to.equal[tile] = is_exact ? totals[1] : 0;
    }
    if (!is_last(&state.tickets[2], row.end_tile - row.first_tile)) return;
    Bits cut = is_exact ? threshold + bin : 0;
    i64 ties = is_exact ? fresh(state.rest) : 0;
    if (listing) {
        const i64 num = fresh(state.listed);
        const Bits* values = to.value + row.first_tile * TILE;
        const auto magnitude = [=](i64 i) { return (Bits)(fresh(values[fresh(list[i])]) & Number<T>::magnitude); };
        kth_largest<Bits, TILE>(each_of<Bits>(magnitude, num), fresh(state.rest), histogram, false, &cut, &ties);
        for (i64 i = threadIdx.x; i < num; i += blockDim.x) {
            const Bits mine = magnitude(i);
            const i64 from = row.first_tile + fresh(list[i]) / TILE;
            if (mine >= cut) atomicAdd(mine > cut ? to.above + from : to.equal + from, 1u);
        }
        __threadfence();
        __syncthreads();
    }
    add_up(to, row, state);
    if (threadIdx.x == 0) {
        state.cut = cut;
        state.ties = ties;
        state.listed = 0;
        state.tickets[2] = 0;
    }
}

// -- emit ----------------------------------------------------------------------------------------------------------

// Decides what of a tile is sent. Slots<T>(call, row, low, high, begin) writes it from slot `begin` on: `put(slot, i,
// bits)` for every element that is, in any order; `done(end)` by all threads once the tile's slots have been put;
// `close(sent)` by those of the segment's last tile, with how many slots count.
template <typename T, template <typename> class Slots> struct Emit : Plain {
    typedef typename Number<T>::Bits Bits;
    Candidates<T> from;
    T fixed;

    __device__ Emit(const Candidates<T>& from_, T fixed_) : from(from_), fixed(fixed_) {}

    __device__ bool encode(const Encode<T>& call, const Row& row, i64 low, i64 high) const {
        if (is_small(row)) return encode_small(call, row, Slots<T>(call, row, low, high, 0));
        const i64 tile = blockIdx.x;
        const State state = from.states[call.tiles[tile].segment];
        i64 above = from.above[tile], equal = from.equal[tile];
        const Slots<T> slots(call, row, low, high, above + least(equal, state.ties));
        const u32 num = from.found[tile];
        for (u32 first = 0; first < num; first += blockDim.x) {
            const u32 i = first + threadIdx.x;
            const Bits value = i < num ? from.value[tile * TILE + i] : 0;
            const u32 index = i < num ? from.index[tile * TILE + i] : 0;
            const Bits magnitude = value & Number<T>::magnitude;
            const bool is_above = i < num && magnitude > state.cut, is_equal = i < num && magnitude == state.cut;
            i64 above_here, equal_here, all_above, all_equal;
            block_scan(is_above, is_equal, &above_here, &equal_here, &all_above, &all_equal);
            above_here += above;
            equal_here += equal;
            if (is_above || (is_equal && equal_here < state.ties))
                slots.put(above_here + least(equal_here, state.ties), index, value);
            above += all_above;
            equal += all_equal;
        }
        slots.done(above + least(equal, state.ties));
        if (high == row.numel) slots.close(state.above + least(state.equal, state.ties));
        return false;  // filter has looked
    }

    // A whole segment. Its sample is all of it, so that the threshold is its k-th largest, or 1 if that is zero.
    __device__ bool encode_small(const Encode<T>& call, const Row& row, const Slots<T>& slots) const {
        __shared__ u32 histogram[BINS];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Bits bits[ROWS];
        u32 passed = 0;
        bool bad = false;
        if (row.numel == 0) {
            slots.close(0);
            return false;
        }
#pragma unroll
        for (int part = 0; part < ROWS; ++part) {
            const i64 i = (warp * ROWS + part) * 32 + lane;
            bits[part] = i < row.numel ? bits_of(call.q(row, i)) : 0;
        }
        const Bits bound = bits_of(fixed);
#pragma unroll
        for (int part = 0; part < ROWS; ++part) {
            const Bits magnitude = bits[part] & Number<T>::magnitude;
            bad = bad || magnitude >= Number<T>::infinity;
            passed += magnitude >= bound;
        }
        i64 all_above, all_equal, above, equal, ties = 0;
        block_scan(passed, 0, &above, &equal, &all_above, &all_equal);
        Bits cut = bound - 1;
        if (!(fixed > T(0)) || all_above > row.count) {
            const auto each = [&](const auto& use) {
#pragma unroll
                for (int part = 0; part < ROWS; ++part) use((u64)(bits[part] & Number<T>::magnitude));
            };
            kth_largest<Bits>(each, row.count, histogram, false, &cut, &ties);
            if (cut == 0) ties = 0;
        }
        u32 is_above = 0, is_equal = 0;
#pragma unroll
        for (int part = 0; part < ROWS; ++part) {
            const Bits magnitude = bits[part] & Number<T>::magnitude;
            is_above += __popc(__ballot_sync(FULL, magnitude > cut));
            is_equal += __popc(__ballot_sync(FULL, magnitude == cut));
        }
        block_scan(lane ? 0 : is_above, lane ? 0 : is_equal, &above, &equal, &all_above, &all_equal);
        // By the warps before. In 32 bits: the registers are few here.
        u32 above_done = __shfl_sync(FULL, (u32)above, 0), equal_done = __shfl_sync(FULL, (u32)equal, 0);
        const u32 num_ties = (u32)ties;
#pragma unroll
        for (int part = 0; part < ROWS; ++part) {
            const i64 i = (warp * ROWS + part) * 32 + lane;
            const Bits magnitude = bits[part] & Number<T>::magnitude;
            const u32 over = __ballot_sync(FULL, magnitude > cut), on = __ballot_sync(FULL, magnitude == cut);
            const u32 equal_here = equal_done + __popc(on & ((1u << lane) - 1));
            const bool sent = magnitude > cut || (magnitude == cut && equal_here < num_ties);
            if (sent)
                slots.put(above_done + __popc(over & ((1u << lane) - 1)) + least(equal_here, num_ties), (u32)i, bits[part]);
            else if (i < row.numel)
                call.keep(row, i, number_of(bits[part]));
            above_done += __popc(over);
            equal_done += __popc(on);
        }
        const i64 all = all_above + least(all_equal, ties);
        slots.done(all);
        slots.close(all);
        return bad;
    }
};

// -- kernels -------------------------------------------------------------------------------------------------------

// All of a sparsifier whose Slots<T> write a body and whose Scatter adds bodies up.
#define SPARSE_KERNELS(T, suffix, Slots, Scatter)                                                                      \
    KERNEL(sample_##suffix, SAMPLE_THREADS,                                                                            \
           (ENCODE_PARAMETERS(T), CANDIDATE_PARAMETERS(T), const Tile* sample_tiles, i64 num_sample_tiles, u64 step,   \
            Number<T>::Bits* sample),                                                                                  \
           sample_tile(ENCODE(T), CANDIDATES(T), sample_tiles, num_sample_tiles, step, sample))                        \
    SMALL_KERNEL(filter_##suffix,                                                                                      \
           (ENCODE_PARAMETERS(T), CANDIDATE_PARAMETERS(T), T fixed, double enough, int attempts, int exact),           \
           filter(ENCODE(T), CANDIDATES(T), fixed, enough, attempts, exact))                                           \
    SMALL_KERNEL(count_##suffix, (ENCODE_PARAMETERS(T), CANDIDATE_PARAMETERS(T)), count(ENCODE(T), CANDIDATES(T)))     \
    SMALL_KERNEL(emit_##suffix, (ENCODE_PARAMETERS(T), CANDIDATE_PARAMETERS(T), T fixed),                              \
           encode_tile(ENCODE(T), Emit<T, Slots>(CANDIDATES(T), fixed)))                                               \
    SMALL_KERNEL(decode_##suffix, (DECODE_PARAMETERS(T)), decode_tile(DECODE(T), Scatter()))
