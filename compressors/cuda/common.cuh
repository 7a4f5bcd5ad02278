// What all kernels share: types, the tables they read, raw segments, headers. No standard headers: NVRTC has none.
//
// Every kernel is compiled without fused multiply-add (--fmad=false), as the host's are: payload bytes must agree.
// Work comes in tiles: one thread block takes one tile of one segment, so that one launch serves all segments of a
// group, however small. Kernels are declared with
// KERNEL or SMALL_KERNEL, which the host emulation of the tests redefines.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 256
#define WARPS (THREADS / 32)
#define FULL 0xffffffffu

// SMALL_KERNEL: at most 64 registers a thread, so that four blocks fit a multiprocessor, for kernels that wait a lot.
#ifndef KERNEL
#define KERNEL(name, threads, parameters, body) \
    extern "C" __global__ void __launch_bounds__(threads) name parameters { body; }
#define SMALL_KERNEL(name, parameters, body) \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) name parameters { body; }
#endif

// One row of the segment table. espresso.compressors.cuda.tables writes it: keep both in step.
struct Row {
    i64 numel;
    i64 offset;      // of the body, in bytes from the payload's beginning
    i64 count;       // the algorithm's own: k, blocks
    i64 source;      // first element in source or target
    i64 residual;    // first element in both residual buffers
    i64 hash;        // of the tensor's name
    i64 start;       // first element within the tensor
    i64 raw;         // travels as plain numbers
    i64 body_end;    // where the body ends,
    i64 end;         // and where its padding does
    i64 first_tile;  // its tiles
    i64 end_tile;
};

struct Tile {
    i64 segment;
    i64 low;  // first element within the segment
};

// at_once: elements that a thread loads before it uses the first, for the memory is far away.
template <typename T> struct Number;
template <> struct Number<float> {
    typedef u32 Bits;
    static const u32 magnitude = 0x7fffffffu;
    static const u32 infinity = 0x7f800000u;
    static const int at_once = 8;
};
template <> struct Number<double> {
    typedef u64 Bits;
    static const u64 magnitude = 0x7fffffffffffffffull;
    static const u64 infinity = 0x7ff0000000000000ull;
    static const int at_once = 4;
};

__device__ inline u32 bits_of(float value) { return __float_as_uint(value); }
__device__ inline u64 bits_of(double value) { return (u64)__double_as_longlong(value); }
__device__ inline float number_of(u32 bits) { return __uint_as_float(bits); }
__device__ inline double number_of(u64 bits) { return __longlong_as_double((i64)bits); }

template <typename T> __device__ inline typename Number<T>::Bits magnitude_of(T value) {
    return bits_of(value) & Number<T>::magnitude;
}

template <typename T> __device__ inline bool is_finite(T value) {
    return magnitude_of(value) < Number<T>::infinity;
}

// Whether a block may be scaled by it: neither negative nor infinite nor a NaN. Without a branch.
template <typename T> __device__ inline bool is_scale(T value) {
    return (value >= T(0)) & (value < number_of(Number<T>::infinity));
}

template <typename A> __device__ inline A least(A a, A b) { return a < b ? a : b; }
template <typename A> __device__ inline A largest(A a, A b) { return a < b ? b : a; }

// A bijection of 64-bit numbers (splitmix64's finaliser), as espresso.cpu_offload.kernels.mix64.
__device__ inline u64 mix64(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// -- encode --------------------------------------------------------------------------------------------------------

// One encode. `old` and `fresh` are null without feedback; `gain` as in espresso.compressors.Feedback. `sync` is two
// words of this stream's own, zero between calls: how many blocks are done, and whether one met a number that is not
// finite.
template <typename T> struct Encode {
    const Row* rows;
    const Tile* tiles;
    i64 num_tiles;
    i64 tile;  // elements of a tile
    const T* source;
    T scale;
    const T* old;
    T* fresh;
    u8* payload;
    const u8* header;
    i64 header_bytes;  // 0: a plain vector for a reduction
    u32* sync;
    T gain;

    __device__ T q(const Row& row, i64 i) const {
        T scaled = source[row.source + i] * scale;
        return old ? scaled + old[row.residual + i] : scaled;
    }
    __device__ void keep(const Row& row, i64 i, T value) const {
        if (fresh)
            fresh[row.residual + i] =
                gain == T(1) ? value : gain * value + (T(1) - gain) * old[row.residual + i];
    }
    template <typename A> __device__ A* body(const Row& row, i64 bytes = 0) const {
        return (A*)(payload + row.offset + bytes);
    }
};

#define ENCODE_PARAMETERS(T)                                                                                     \
    const Row *rows, const Tile *tiles, i64 num_tiles, i64 tile, const T *source, T scale, const T *old, T *fresh, \
        u8 *payload, const u8 *header, i64 header_bytes, u32 *sync, T gain
#define ENCODE(T) \
    Encode<T> { rows, tiles, num_tiles, tile, source, scale, old, fresh, payload, header, header_bytes, sync, gain }

// q of at_once elements of this thread, from `first` on, THREADS apart. Those past the end come out as zero.
template <typename T> __device__ void load_q(const Encode<T>& call, const Row& row, i64 first, i64 high, T* q) {
#pragma unroll
    for (int part = 0; part < Number<T>::at_once; ++part) {
        const i64 i = first + part * THREADS + threadIdx.x;
        q[part] = i < high ? call.q(row, i) : T(0);
    }
}

// q itself is sent, nothing is kept. Returns whether something is not finite.
template <typename T> __device__ bool encode_raw(const Encode<T>& call, const Row& row, i64 low, i64 high) {
    T* out = call.template body<T>(row);
    bool bad = false;
    for (i64 first = low; first < high; first += Number<T>::at_once * THREADS) {
        T q[Number<T>::at_once];
        load_q(call, row, first, high, q);
#pragma unroll
        for (int part = 0; part < Number<T>::at_once; ++part) {
            const i64 i = first + part * THREADS + threadIdx.x;
            if (i < high) {
                out[i] = q[part];
                call.keep(row, i, T(0));
            }
            bad = bad || !is_finite(q[part]);
        }
    }
    return bad;
}

// The zero bytes behind a body.
template <typename T> __device__ void pad(const Encode<T>& call, const Row& row) {
    for (i64 at = row.body_end + threadIdx.x; at < row.end; at += blockDim.x) call.payload[at] = 0;
}

// The last block to finish writes the header, for only then is it known whether all was finite. Returns, in that
// block, 1 if all was and 2 if not; 0 in the others.
template <typename T> __device__ int finish(const Encode<T>& call, bool bad) {
    __shared__ u32 outcome;
    int any = __syncthreads_or(bad);
    if (threadIdx.x == 0) {
        if (any) atomicOr(call.sync + 1, 1u);
        __threadfence();
        outcome = 0;
        if (atomicAdd(call.sync, 1u) == gridDim.x - 1) {
            __threadfence();
            outcome = 1 + atomicOr(call.sync + 1, 0u);
            call.sync[0] = 0;
            call.sync[1] = 0;
        }
    }
    __syncthreads();
    u32 mine = outcome;
    if (mine) {
        for (i64 at = threadIdx.x; at < call.header_bytes; at += blockDim.x)
            call.payload[at] = at == 5 ? (u8)(mine - 1) : call.header[at];
    }
    return (int)mine;
}

// -- decode --------------------------------------------------------------------------------------------------------

#define HEADER_WORDS 3  // of 8 bytes
#define ENTRY_WORDS 2
#define FLAGS_AT 5
#define HEADER_ERROR (1ull << 62)

// One decode. `status`: [0] becomes 1 if a row holds the flag "not finite", [1] the largest error code
// 1 + row * segments + segment; HEADER_ERROR is added where the header is wrong.
template <typename T> struct Decode {
    const Row* rows;
    const Tile* tiles;
    i64 num_tiles;
    i64 tile;
    i64 num_segments;
    T* target;
    T scale;
    i64 num_rows;
    i64 row_bytes;
    const u8* payload;
    const u8* header;
    i64 header_bytes;
    u64* status;

    template <typename A> __device__ const A* body(i64 source, const Row& row, i64 bytes = 0) const {
        return (const A*)(payload + source * row_bytes + row.offset + bytes);
    }
    __device__ void malformed(i64 source, i64 segment) const {
        atomicMax(status + 1, (u64)(1 + source * num_segments + segment));
    }
};

#define DECODE_PARAMETERS(T)                                                                                       \
    const Row *rows, const Tile *tiles, i64 num_tiles, i64 tile, i64 num_segments, T *target, T scale, i64 num_rows, \
        i64 row_bytes, const u8 *payload, const u8 *header, i64 header_bytes, u64 *status
#define DECODE(T)                                                                                                 \
    Decode<T> {                                                                                                   \
        rows, tiles, num_tiles, tile, num_segments, target, scale, num_rows, row_bytes, payload, header, header_bytes, \
            status                                                                                                \
    }

// The number of the block of `size` that an element is in; segments have fewer than 2^32 elements.
__device__ inline i64 block_of(i64 element, int size) { return (u32)element / (u32)size; }

// The same within a tile, which begins with a block and has at most 2^16 elements: elements and blocks are counted from
// its first, and a multiplication is enough.
struct BlockOf {
    i64 first;  // block of the segment
    u32 inverse;

    __device__ BlockOf() : first(0), inverse(0) {}  // all elements in block 0
    __device__ BlockOf(i64 low, int size) : first(block_of(low, size)), inverse(0xffffffffu / (u32)size + 1) {}

    __device__ u32 operator()(u32 at) const { return (u32)((u64)at * inverse >> 32); }
};

// Look at every row's header and at this segment's entry of its table: every segment has a tile, so that together
// the tiles look at everything. Where there are no segments one block looks, for "segment" -1. Returns, to all threads,
// whether a row is not finite.
template <typename T> __device__ bool check_headers(const Decode<T>& call, i64 segment) {
    bool flagged = false;
    if (call.header_bytes) {
        for (i64 source = threadIdx.x; source < call.num_rows; source += blockDim.x) {
            const u64* head = (const u64*)(call.payload + source * call.row_bytes);
            const u64* wanted = (const u64*)call.header;
            const i64 entry = HEADER_WORDS + ENTRY_WORDS * segment;
            const u64 flags = head[0] >> (8 * FLAGS_AT) & 255;
            u64 differs = (head[0] ^ wanted[0]) & ~(255ull << (8 * FLAGS_AT));
            for (int word = 1; word < HEADER_WORDS; ++word) differs |= head[word] ^ wanted[word];
            if (segment >= 0)
                for (int word = 0; word < ENTRY_WORDS; ++word) differs |= head[entry + word] ^ wanted[entry + word];
            const bool wrong = differs != 0 || (flags & ~1ull) != 0;
            const i64 place = source * largest(call.num_segments, (i64)1) + largest(segment, (i64)0);
            if (wrong) atomicMax(call.status + 1, HEADER_ERROR + (u64)(1 + place));
            flagged = flagged || (flags & 1);
        }
    }
    bool any = __syncthreads_or(flagged) != 0;
    if (any && threadIdx.x == 0) call.status[0] = 1;
    return any;
}

template <typename T> __device__ void fill_nan(const Decode<T>& call, const Row& row, i64 low, i64 high) {
    const T nan = number_of((typename Number<T>::Bits)(Number<T>::infinity | (Number<T>::infinity >> 1)));
    for (i64 i = low + threadIdx.x; i < high; i += blockDim.x) call.target[row.source + i] = nan;
}

// What a thread can store at once.
template <typename T> struct __align__(16) Wide {
    T of[16 / sizeof(T)];
};

// Store `each` numbers of every thread of a warp, side by side from the thread's `at` on, as far as the target's `num`
// reach. Where the target is not aligned they go through shared memory, so that the warp still writes whole lines.
template <int each, typename T> __device__ void store(T* target, int num, int at, const T* value) {
    const int lane = threadIdx.x % 32, begin = at - each * lane, wide = 16 / sizeof(T);
    if (each == 1) {
        if (at < num) target[at] = *value;
    } else if (begin + 32 * each <= num && (u64)target % 16 == 0) {
#pragma unroll
        for (int k = 0; k < each; k += wide) {
            Wide<T> some;
#pragma unroll
            for (int i = 0; i < wide; ++i) some.of[i] = value[(k + i) % each];
            *(Wide<T>*)(target + at + k) = some;
        }
    } else {
        __shared__ T room[THREADS * each];
        T* mine = room + each * (threadIdx.x - lane);
#pragma unroll
        for (int k = 0; k < each; ++k) mine[each * lane + k] = value[k];
        __syncwarp();
#pragma unroll
        for (int i = lane; i < 32 * each; i += 32)
            if (begin + i < num) target[begin + i] = mine[i];
        __syncwarp();
    }
}

// target = scale * sum of the rows' numbers, rows in order. A thread takes groups of `each` elements side by side, and
// loads `at_once` of them before it uses the first. Elements are counted from the tile's first, which begins a group.
// Reader: `load` fetches the group of a row's body that begins with an element, whatever it holds; `values` makes its
// numbers and says if something is wrong; `complain` is told of a row with something wrong.
// All threads of the block call `load` and `values` together, those past the end with the last group. That one may reach
// past the end itself: it reads the body's padding then, for numbers that are not stored.
template <typename T, typename Reader>
__device__ void decode_sum(const Decode<T>& call, const Row& row, i64 low, i64 high, const Reader& reader) {
    const int each = Reader::each, at_once = Reader::at_once;
    const int num = (int)(high - low), last = (num - 1) / each * each;
    T* target = call.target + row.source + low;
    const T nothing = call.num_rows ? -T(0) : T(0);  // adding it changes no number
    for (int first = each * threadIdx.x; first - each * (int)threadIdx.x < num; first += at_once * each * THREADS) {
        T total[at_once][each];
#pragma unroll
        for (int part = 0; part < at_once; ++part)
#pragma unroll
            for (int k = 0; k < each; ++k) total[part][k] = nothing;
        const u8* body = call.template body<u8>(0, row);
#pragma unroll (each == 1 ? 2 : 1)  // registers are too few for two rows of groups
        for (i64 source = 0; source < call.num_rows; ++source, body += call.row_bytes) {
            typename Reader::Loaded loaded[at_once];
            bool wrong = false;
#pragma unroll
            for (int part = 0; part < at_once; ++part)
                loaded[part] = reader.load(body, least(first + part * each * THREADS, last));
#pragma unroll
            for (int part = 0; part < at_once; ++part) {
                T value[each];
                wrong |= reader.values(loaded[part], least(first + part * each * THREADS, last), value);
#pragma unroll
                for (int k = 0; k < each; ++k) total[part][k] += value[k];
            }
            if (wrong) reader.complain(source);
        }
#pragma unroll
        for (int part = 0; part < at_once; ++part) {
#pragma unroll
            for (int k = 0; k < each; ++k) total[part][k] *= call.scale;
            store<each>(target, num, first + part * each * THREADS, total[part]);
        }
    }
}

// Plain numbers. A vector (no header) is watched for such as are not finite.
template <typename T> struct RawReader {
    typedef T Loaded;
    static const int each = 1, at_once = Number<T>::at_once;
    const Decode<T>& call;
    i64 low;

    __device__ T load(const u8* body, int at) const { return ((const T*)body + low)[at]; }
    __device__ bool values(T loaded, int, T* value) const {
        *value = loaded;
        return !is_finite(loaded);
    }
    __device__ void complain(i64) const {
        if (!call.header_bytes) call.status[0] = 1;
    }
};

template <typename T> __device__ void decode_raw(const Decode<T>& call, const Row& row, i64 low, i64 high) {
    decode_sum(call, row, low, high, RawReader<T>{call, low});
}

// -- tiles ---------------------------------------------------------------------------------------------------------

// Encode this block's tile with `Body::encode`, and the header with the last. Body: a struct of the parameters.
template <typename T, typename Body> __device__ void encode_tile(const Encode<T>& call, const Body& body) {
    bool bad = false;
    if (blockIdx.x < call.num_tiles) {
        Tile tile = call.tiles[blockIdx.x];
        Row row = call.rows[tile.segment];
        i64 high = least(tile.low + call.tile, row.numel);
        bad = row.raw ? encode_raw(call, row, tile.low, high) : body.encode(call, row, tile.low, high);
        if (high == row.numel) pad(call, row);
    }
    int outcome = finish(call, bad);
    if (outcome) body.finished(call, outcome == 2);
}

// Decode this block's tile with `Body::decode`.
template <typename T, typename Body> __device__ void decode_tile(const Decode<T>& call, const Body& body) {
    if (blockIdx.x >= call.num_tiles) {
        check_headers(call, -1);
        return;
    }
    Tile tile = call.tiles[blockIdx.x];
    Row row = call.rows[tile.segment];
    i64 high = least(tile.low + call.tile, row.numel);
    if (check_headers(call, tile.segment))
        fill_nan(call, row, tile.low, high);
    else if (row.raw)
        decode_raw(call, row, tile.low, high);
    else
        body.decode(call, row, tile.segment, tile.low, high);
}

// What most algorithms do once the header is written: nothing.
struct Plain {
    template <typename T> __device__ void finished(const Encode<T>&, bool) const {}
};
