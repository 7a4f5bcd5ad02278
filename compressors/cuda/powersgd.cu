// PowerSGD. Formulas: espresso/compressors/powersgd.py; twin: espresso/cpu_offload/powersgd.py.
//
// Passes over the gradients: encode reads gradient and residual and writes M, transform reads M for Q and again to
// subtract, decode writes the target. All sums have a shape that depends on the matrix alone, never on the order in
// which blocks run, on a library or on the device: what ranks compute from equal vectors is equal.
//
// A rank's own products (M Q, M' P) are added in another order than the host's, which leaves that to its compiler.
// What all ranks must agree on is not: subtracting and decoding round as the host's do; orthonormalising is its
// Gram-Schmidt in double with the sums of 512 threads.

#include "common.cuh"

#define COLUMNS_TILE 32    // columns of a block's partial product
#define ROWS_CHUNK 256     // rows of it
#define PART 4             // columns of P and Q that are worked on together
#define ORTHO_THREADS 512
#define TINY 1e-6          // as in the host's twin

// One segment. espresso.compressors.cuda.powersgd writes it: keep both in step. Raw ones have rank 0, one row.
struct Matrix {
    i64 rows;
    i64 columns;
    i64 rank;
    i64 source;    // first element in source or target
    i64 residual;  // in both residual buffers
    i64 p;         // in the first vector, one column of P after the other
    i64 q;         // in the second vector, likewise
    i64 partial;   // in the scratch of partial products
    i64 chunks;    // of ROWS_CHUNK rows
    i64 step;      // rows of a tile, or elements of a raw one; 1: a row takes a whole block
};

template <typename T> __device__ inline T warp_sum_of(T value) {
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(FULL, value, distance);
    return value;
}

// -- encode --------------------------------------------------------------------------------------------------------

// Row k of the start is what was kept, or where that is all zeros (a step without gradients) the other.
template <typename T>
__device__ void start(const Matrix* matrices, const Tile* tiles, const T* kept, const T* other, T* out) {
    const Tile tile = tiles[blockIdx.x];
    const Matrix m = matrices[tile.segment];
    const i64 first = m.q + tile.low * m.columns;
    bool alive = false;
    for (i64 j = threadIdx.x; j < m.columns; j += THREADS) alive = alive || magnitude_of(kept[first + j]) != 0;
    const bool any = __syncthreads_or(alive) != 0;
    for (i64 j = threadIdx.x; j < m.columns; j += THREADS) out[first + j] = any ? kept[first + j] : other[first + j];
}

// M into `fresh`, and M Q: a warp a row, or a block where rows are long.
template <typename T>
__device__ void encode(
    const Matrix* matrices, const Tile* tiles, const T* __restrict__ source, T scale, const T* __restrict__ old,
    T* __restrict__ fresh, const T* __restrict__ starts, T* __restrict__ first, T gain
) {
    __shared__ T sums[WARPS][PART];
    const Tile tile = tiles[blockIdx.x];
    const Matrix m = matrices[tile.segment];
    if (m.rank == 0) {
        const i64 high = least(tile.low + m.step, m.columns);
        for (i64 i = tile.low + threadIdx.x; i < high; i += THREADS) {
            first[m.p + i] = source[m.source + i] * scale + old[m.residual + i];
            fresh[m.residual + i] = (T(1) - gain) * old[m.residual + i];
        }
        return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool wide = m.step == 1;
    const i64 high = least(tile.low + m.step, m.rows);
    for (i64 row = wide ? tile.low : tile.low + warp; row < high; row += WARPS) {
        const T* given = source + m.source + row * m.columns;
        const T* before = old + m.residual + row * m.columns;
        T* matrix = fresh + m.residual + row * m.columns;
        for (i64 base = 0; base < m.rank; base += PART) {
            T sum[PART] = {T(0), T(0), T(0), T(0)};
            const int parts = (int)least((i64)PART, m.rank - base);
            const T* q = starts + m.q + base * m.columns;
#pragma unroll 4
            for (i64 j = wide ? threadIdx.x : lane; j < m.columns; j += wide ? THREADS : 32) {
                T value;
                if (base == 0) {
                    value = given[j] * scale + before[j];
                    matrix[j] = value;
                } else {
                    value = matrix[j];
                }
#pragma unroll
                for (int part = 0; part < PART; ++part)
                    if (part < parts) sum[part] += value * q[part * m.columns + j];
            }
#pragma unroll
            for (int part = 0; part < PART; ++part) sum[part] = warp_sum_of(sum[part]);
            if (wide) {
                if (lane == 0)
                    for (int part = 0; part < PART; ++part) sums[warp][part] = sum[part];
                __syncthreads();
                if (threadIdx.x < parts) {
                    T total = sums[0][threadIdx.x];
                    for (int other = 1; other < WARPS; ++other) total += sums[other][threadIdx.x];
                    first[m.p + (base + threadIdx.x) * m.rows + row] = total;
                }
                __syncthreads();
            } else if (lane == 0) {
                for (int part = 0; part < parts; ++part) first[m.p + (base + part) * m.rows + row] = sum[part];
            }
        }
    }
}

// -- transform -----------------------------------------------------------------------------------------------------

__device__ double block_sum(double value, double* shared) {
    value = warp_sum_of(value);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    double total = shared[0];
    for (int warp = 1; warp < ORTHO_THREADS / 32; ++warp) total += shared[warp];
    __syncthreads();
    return total;
}

template <typename T> __device__ double norm_of(const T* row, i64 numel, double* shared, u64* largest_shared) {
    double largest_value = 1.0;
    if (sizeof(T) == 8) {  // squares of doubles may leave the range; squares of floats do not, in double
        u64 top = 0;
        for (i64 i = threadIdx.x; i < numel; i += ORTHO_THREADS) top = largest(top, (u64)magnitude_of(row[i]));
        for (int distance = 16; distance; distance /= 2) top = largest(top, __shfl_xor_sync(FULL, top, distance));
        if (threadIdx.x % 32 == 0) largest_shared[threadIdx.x / 32] = top;
        __syncthreads();
        top = largest_shared[0];
        for (int warp = 1; warp < ORTHO_THREADS / 32; ++warp) top = largest(top, largest_shared[warp]);
        __syncthreads();
        largest_value = number_of(top);
        if (top == 0 || top >= Number<double>::infinity) return largest_value;
    }
    double total = 0;
    for (i64 i = threadIdx.x; i < numel; i += ORTHO_THREADS) {
        const double part = (double)row[i] / largest_value;
        total += part * part;
    }
    return largest_value * sqrt(block_sum(total, shared));
}

// Modified Gram-Schmidt on the columns of P, twice, in double; one block a matrix. A thread keeps to its own elements,
// so that only the sums need barriers; each update takes the next product along.
template <typename T>
__device__ void orthonormalise(const Matrix* matrices, const Tile* tiles, T* first) {
    __shared__ double shared[ORTHO_THREADS / 32];
    __shared__ u64 largest_shared[ORTHO_THREADS / 32];
    const Matrix m = matrices[tiles[blockIdx.x].segment];
    T* p = first + m.p;
    for (i64 k = 0; k < m.rank; ++k) {
        T* row = p + k * m.rows;
        const double length = norm_of(row, m.rows, shared, largest_shared);
        double mine = 0;
        if (k > 0)
            for (i64 i = threadIdx.x; i < m.rows; i += ORTHO_THREADS) mine += (double)p[i] * (double)row[i];
        for (i64 turn = 0; turn < 2 * k; ++turn) {
            const double product = block_sum(mine, shared);
            const T* other = p + turn % k * m.rows;
            const T* next = p + (turn + 1) % k * m.rows;
            mine = 0;
            for (i64 i = threadIdx.x; i < m.rows; i += ORTHO_THREADS) {
                row[i] = (T)((double)row[i] - product * (double)other[i]);
                mine += (double)next[i] * (double)row[i];
            }
        }
        const double left = norm_of(row, m.rows, shared, largest_shared);
        const bool finite = is_finite(left), gone = left <= TINY * length;
        const T nan = number_of((typename Number<T>::Bits)(Number<T>::infinity | (Number<T>::infinity >> 1)));
        for (i64 i = threadIdx.x; i < m.rows; i += ORTHO_THREADS)
            row[i] = !finite ? nan : gone ? T(0) : (T)((double)row[i] / left);
        __syncthreads();  // the next column reads what other threads wrote here
    }
}

// Parts of M' P: 32 columns and up to 256 rows a block, a warp every eighth row.
template <typename T>
__device__ void multiply(
    const Matrix* matrices, const Tile* tiles, const T* __restrict__ fresh, const T* __restrict__ first,
    T* __restrict__ partial
) {
    __shared__ T sums[WARPS][PART][COLUMNS_TILE];
    const Tile tile = tiles[blockIdx.x];
    const Matrix m = matrices[tile.segment];
    const i64 chunk = tile.low % m.chunks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 column = tile.low / m.chunks * COLUMNS_TILE + lane;
    const i64 high = least((chunk + 1) * ROWS_CHUNK, m.rows);
    const T* matrix = fresh + m.residual;
    for (i64 base = 0; base < m.rank; base += PART) {
        T sum[PART] = {T(0), T(0), T(0), T(0)};
        const int parts = (int)least((i64)PART, m.rank - base);
        const T* p = first + m.p + base * m.rows;
        if (column < m.columns) {
#pragma unroll 4
            for (i64 row = chunk * ROWS_CHUNK + warp; row < high; row += WARPS) {
                const T value = matrix[row * m.columns + column];
#pragma unroll
                for (int part = 0; part < PART; ++part)
                    if (part < parts) sum[part] += p[part * m.rows + row] * value;
            }
        }
#pragma unroll
        for (int part = 0; part < PART; ++part) sums[warp][part][lane] = sum[part];
        __syncthreads();
        if (warp < parts && column < m.columns) {
            T total = sums[0][warp][lane];
            for (int other = 1; other < WARPS; ++other) total += sums[other][warp][lane];
            partial[m.partial + (chunk * m.rank + base + warp) * m.columns + column] = total;
        }
        __syncthreads();
    }
}

// Q: the parts of all chunks, in order.
template <typename T>
__device__ void gather(const Matrix* matrices, const Tile* tiles, i64 tile, const T* partial, T* second) {
    const Tile mine = tiles[blockIdx.x];
    const Matrix m = matrices[mine.segment];
    const i64 size = m.rank * m.columns, high = least(mine.low + tile, size);
    for (i64 i = mine.low + threadIdx.x; i < high; i += THREADS) {
        T total = partial[m.partial + i];
        for (i64 chunk = 1; chunk < m.chunks; ++chunk) total += partial[m.partial + chunk * size + i];
        second[m.q + i] = total;
    }
}

// Every row of this block's tile: `body(row, column)`.
template <typename Body> __device__ void each_element(const Matrix& m, const Tile& tile, const Body& body) {
    const bool wide = m.step == 1;
    const i64 high = least(tile.low + m.step, m.rows);
    for (i64 row = wide ? tile.low : tile.low + threadIdx.x / 32; row < high; row += WARPS)
        for (i64 j = wide ? threadIdx.x : threadIdx.x % 32; j < m.columns; j += wide ? THREADS : 32) body(row, j);
}

template <typename T> struct Subtract {
    const Matrix& m;
    const T* p;
    const T* q;
    const T* old;
    T* matrix;
    T gain;  // as in espresso.compressors.Feedback

    __device__ void operator()(i64 row, i64 j) const {
        const i64 at = row * m.columns + j;
        T value = matrix[at];
        for (i64 k = 0; k < m.rank; ++k) value -= p[k * m.rows + row] * q[k * m.columns + j];
        matrix[at] = gain == T(1) ? value : gain * value + (T(1) - gain) * old[at];
    }
};

template <typename T>
__device__ void subtract(
    const Matrix* matrices, const Tile* tiles, const T* first, const T* second, const T* old, T* fresh, T gain
) {
    const Tile tile = tiles[blockIdx.x];
    const Matrix m = matrices[tile.segment];
    if (m.rank)
        each_element(m, tile, Subtract<T>{m, first + m.p, second + m.q, old + m.residual, fresh + m.residual, gain});
}

// -- decode --------------------------------------------------------------------------------------------------------

template <typename T> struct Write {
    const Matrix& m;
    const T* p;
    const T* q;
    T* target;
    T scale;
    bool* bad;

    __device__ void operator()(i64 row, i64 j) const {
        T value = (scale * p[row]) * q[j];
        for (i64 k = 1; k < m.rank; ++k) value += (scale * p[k * m.rows + row]) * q[k * m.columns + j];
        target[row * m.columns + j] = value;
        *bad = *bad || !is_finite(value);
    }
};

// scale * P Q', and what travels raw; notes in `status` whether something is not finite.
template <typename T>
__device__ void decode(
    const Matrix* matrices, const Tile* tiles, const T* first, const T* second, T* target, T scale, u64* status
) {
    const Tile tile = tiles[blockIdx.x];
    const Matrix m = matrices[tile.segment];
    bool bad = false;
    if (m.rank) {
        each_element(m, tile, Write<T>{m, first + m.p, second + m.q, target + m.source, scale, &bad});
    } else {
        const i64 high = least(tile.low + m.step, m.columns);
        for (i64 i = tile.low + threadIdx.x; i < high; i += THREADS) {
            const T value = first[m.p + i] * scale;
            target[m.source + i] = value;
            bad = bad || !is_finite(value);
        }
    }
    if (bad) status[0] = 1;
}

// ------------------------------------------------------------------------------------------------------------------

#define COMMON const Matrix *matrices, const Tile *tiles
#define POWERSGD_KERNELS(T, name)                                                                                 \
    KERNEL(start_##name, THREADS, (COMMON, const T *kept, const T *other, T *out),                                \
           start<T>(matrices, tiles, kept, other, out))                                                           \
    KERNEL(encode_##name, THREADS,                                                                                \
           (COMMON, const T *source, T scale, const T *old, T *fresh, const T *starts, T *first, T gain),         \
           encode<T>(matrices, tiles, source, scale, old, fresh, starts, first, gain))                            \
    KERNEL(orthonormalise_##name, ORTHO_THREADS, (COMMON, T *first), orthonormalise<T>(matrices, tiles, first))   \
    KERNEL(multiply_##name, THREADS, (COMMON, const T *fresh, const T *first, T *partial),                        \
           multiply<T>(matrices, tiles, fresh, first, partial))                                                   \
    KERNEL(gather_##name, THREADS, (COMMON, i64 tile, const T *partial, T *second),                               \
           gather<T>(matrices, tiles, tile, partial, second))                                                     \
    KERNEL(subtract_##name, THREADS,                                                                              \
           (COMMON, const T *first, const T *second, const T *old, T *fresh, T gain),                             \
           subtract<T>(matrices, tiles, first, second, old, fresh, gain))                                         \
    KERNEL(decode_##name, THREADS,                                                                                \
           (COMMON, const T *first, const T *second, T *target, T scale, u64 *status),                            \
           decode<T>(matrices, tiles, first, second, target, scale, status))

POWERSGD_KERNELS(float, f32)
POWERSGD_KERNELS(double, f64)
