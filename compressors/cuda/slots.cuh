// Where a sparsifier's body has what. Format: espresso/compressors/sparse.py. Needs common.cuh.

#define SPAN 65536  // elements whose indices share their upper half

// How many ends a body has: one for each span but the last.
__device__ inline i64 num_ends(i64 numel) { return numel > 0 ? (numel - 1) / SPAN : 0; }

// In bytes from the body's beginning. `places` are the indices' lower halves.
__device__ inline i64 ends_at(i64 slots, i64 itemsize) { return 8 + slots * itemsize; }
__device__ inline i64 places_at(i64 numel, i64 slots, i64 itemsize) {
    return ends_at(slots, itemsize) + 4 * num_ends(numel);
}

// The span of a slot, `span` or a later one: how many of `num` ends do not lie behind it.
__device__ inline i64 span_of(const u32* ends, i64 num, i64 slot, i64 span) {
    while (span < num) {
        const i64 middle = (span + num) / 2;
        if ((i64)ends[middle] <= slot)
            span = middle + 1;
        else
            num = middle;
    }
    return span;
}
