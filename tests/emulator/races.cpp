// Finds data races in emulated kernels: the compiler calls these functions before every access (g++ -fsanitize=thread,
// linked with this file instead of its library), and the emulation tells them of threads and barriers.
//
// Watched are shared memory and the arrays that a launch was given. Two accesses of different threads to one byte, one
// of them a write and not both atomic, must be ordered:
//
//   within a block    by a __syncthreads between them, or by a __syncwarp in one warp
//   between blocks    by an atomic on one address in either block, in which the earlier block has a __threadfence before
//                     its atomic, and a __syncthreads or the same thread joins accesses and atomics
//
// Shuffles and votes order nothing here, nor does the order in which the emulation runs threads: a race shows however
// they ran. Reads of shared memory that the block has not written are reported too.

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

extern char __bss_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden")));  // where the compiler puts shared variables; the emulation's own lie elsewhere

namespace {

struct When {
    int block = -1, thread = 0;
    unsigned generation = 0, warp_syncs = 0;
};

struct Byte {
    unsigned launch = 0;
    When write, atomic, read, other_read;
};

struct Range {
    char* begin;
    char* end;
    std::vector<Byte> bytes;
};

struct Edge {  // what a block did with an atomic
    unsigned generation;
    int thread;
};

struct Joined {  // what another block did before, and since when a block knows
    Edge theirs, ours;
};

const unsigned MANY = 8;
std::vector<Range> ranges;
std::vector<std::string> reports;
std::unordered_map<void*, std::map<int, Edge>> released;
std::map<int, Joined> acquired;  // by the running block
unsigned launch, fences_before, fences_now;
std::vector<unsigned> fenced, warp_syncs;
std::vector<bool> has_fenced;
int block_size;
bool active;
When now;

void report(const char* what, const Range& range, char* at, const When& before, void* where) {
    if (reports.size() >= MANY) return;
    char text[256];
    snprintf(text, sizeof text, "%s: %s byte %ld, block %d thread %d and block %d thread %d (code at %#lx)", what,
             &range == &ranges[0] ? "shared" : "array", (long)(at - range.begin), before.block, before.thread,
             now.block, now.thread, (long)((char*)where - (char*)0));
    reports.push_back(text);
}

bool is_ordered(const When& before) {
    if (before.block < 0 || (before.block == now.block && before.thread == now.thread)) return true;
    if (before.block == now.block)
        return before.generation < now.generation ||
               (before.thread / 32 == now.thread / 32 && before.warp_syncs < now.warp_syncs);
    const auto found = acquired.find(before.block);
    if (found == acquired.end()) return false;
    const Joined& joined = found->second;
    return (before.generation < joined.theirs.generation || before.thread == joined.theirs.thread) &&
           (joined.ours.generation < now.generation || joined.ours.thread == now.thread);
}

enum Kind { READ, WRITE, ATOMIC };

void access(void* address, size_t size, Kind kind, void* where) {
    if (!active) return;
    char* at = (char*)address;
    for (Range& range : ranges) {
        if (at < range.begin || at >= range.end) continue;
        for (size_t i = 0; i < size && at + i < range.end; ++i) {
            Byte& byte = range.bytes[at + i - range.begin];
            const bool shared = &range == &ranges[0];
            if (byte.launch != launch || (shared && byte.write.block != now.block && byte.atomic.block != now.block)) {
                byte = Byte();
                byte.launch = launch;
                if (shared && kind != WRITE) report("read before it is written", range, at + i, now, where);
            }
            if (!is_ordered(byte.write)) report(kind == READ ? "write, read" : "write, write", range, at + i, byte.write, where);
            if (kind != ATOMIC && !is_ordered(byte.atomic)) report("atomic, plain", range, at + i, byte.atomic, where);
            if (kind != READ && !is_ordered(byte.read)) report("read, write", range, at + i, byte.read, where);
            if (kind != READ && !is_ordered(byte.other_read)) report("read, write", range, at + i, byte.other_read, where);
            if (kind == WRITE) byte.write = now;
            if (kind == ATOMIC) byte.atomic = now;
            if (kind == READ) {
                if (byte.read.block != now.block || byte.read.thread != now.thread) byte.other_read = byte.read;
                byte.read = now;
            }
        }
        return;
    }
}

}  // namespace

extern "C" {

// From the emulation.
void races_launch() {
    ++launch;
    if (ranges.empty()) ranges.push_back({&__bss_start, &_end, std::vector<Byte>(&_end - &__bss_start)});
    released.clear();
}
void races_block(int block, int threads) {
    now = When();
    now.block = block;
    block_size = threads;
    acquired.clear();
    warp_syncs.assign(threads, 0);
    has_fenced.assign(threads, false);
    fences_before = fences_now = 0;
}
void races_thread(int thread) {
    now.thread = thread;
    now.warp_syncs = warp_syncs[thread];
    active = true;
}
void races_pause() { active = false; }
void races_barrier() {
    ++now.generation;
    fences_before = fences_now;
    fences_now = 0;
    has_fenced.assign(block_size, false);
}
void races_syncwarp() { now.warp_syncs = ++warp_syncs[now.thread]; }
void races_fence() {
    if (!has_fenced[now.thread]) ++fences_now;
    has_fenced[now.thread] = true;
}
void races_atomic(void* at, size_t size) {
    access(at, size, ATOMIC, __builtin_return_address(0));
    auto& others = released[at];
    for (const auto& [block, edge] : others) {
        const auto known = acquired.find(block);
        if (block != now.block && (known == acquired.end() || known->second.theirs.generation < edge.generation))
            acquired[block] = {edge, {now.generation, now.thread}};
    }
    if (has_fenced[now.thread] || (int)fences_before == block_size) others[now.block] = {now.generation, now.thread};
}

// From Python.
void races_watch(char* begin, size_t bytes) {
    if (ranges.empty()) ranges.push_back({&__bss_start, &_end, std::vector<Byte>(&_end - &__bss_start)});
    ranges.push_back({begin, begin + bytes, std::vector<Byte>(bytes)});
}
void races_forget() {
    if (!ranges.empty()) ranges.resize(1);
}
const char* races_take() {
    static std::string text;
    text.clear();
    for (const std::string& line : reports) text += line + "\n";
    reports.clear();
    return text.c_str();
}

// From the compiler.
void __tsan_init() {}
#define ACCESS(size)                                                                                           \
    void __tsan_read##size(void* at) { access(at, size, READ, __builtin_return_address(0)); }                  \
    void __tsan_write##size(void* at) { access(at, size, WRITE, __builtin_return_address(0)); }                \
    void __tsan_unaligned_read##size(void* at) { access(at, size, READ, __builtin_return_address(0)); }        \
    void __tsan_unaligned_write##size(void* at) { access(at, size, WRITE, __builtin_return_address(0)); }      \
    void __tsan_volatile_read##size(void* at) { access(at, size, READ, __builtin_return_address(0)); }         \
    void __tsan_volatile_write##size(void* at) { access(at, size, WRITE, __builtin_return_address(0)); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* at, size_t size) { access(at, size, READ, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t size) { access(at, size, WRITE, __builtin_return_address(0)); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
