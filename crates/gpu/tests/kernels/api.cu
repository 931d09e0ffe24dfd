// Kernels as a user of `weft/device.cuh` would write them: every call of the header, by threads, warps and blocks, with what they bring looked at byte by byte.
//
// Each comes once for each scope. A group has a lane of its own in the heap: two buffers to be written by peers, one that it puts from, and words to signal with.
#include "../../include/weft/device.cuh"

using namespace weft;

// As `Case` in `device_api.rs`.
struct Case {
    u32 rounds;
    u32 bytes;
    // Where the bytes lie after a multiple of sixteen, here and there.
    u32 to_shift;
    u32 from_shift;
    // From one buffer to the next.
    u32 stride;
    u32 groups;
    // Words of this rank's, see `Report`.
    u64 report;
    // Memory of the device's that is in no heap, for what is put from there and got to there; for times, where they are told. None where it is zero.
    u64 apart;
};

struct Report {
    u64 wrong;
    u64 first;
    u64 sum;
    u64 took_ns;
};

static constexpr u32 BUFFERS = 3;
static constexpr u32 WORDS = 2;

template <class Group>
WEFT_DEVICE u32 group_index() {
    return (blockIdx.x * blockDim.x + threadIdx.x) / Group::count();
}
template <>
WEFT_DEVICE u32 group_index<Block>() {
    return blockIdx.x;
}

// What a byte is, by who wrote it and when.
WEFT_DEVICE u8 pattern(u32 rank, u32 group, u32 round, u32 at) {
    u32 mix = (rank * 0x9e3779b1u) ^ (group * 0x85ebca6bu) ^ (round * 0xc2b2ae35u) ^ (at * 0x27d4eb2fu);
    return (u8)(mix >> 24 ^ mix >> 8);
}

template <class Group>
WEFT_DEVICE void fill(u8 *to, u32 bytes, u32 rank, u32 group, u32 round) {
    for (u32 i = Group::index(); i < bytes; i += Group::count()) to[i] = pattern(rank, group, round, i);
    Group::sync();
}

template <class Group>
WEFT_DEVICE void compare(Report *report, const u8 *with, u32 bytes, u32 rank, u32 group, u32 round) {
    for (u32 i = Group::index(); i < bytes; i += Group::count()) {
        if (with[i] != pattern(rank, group, round, i)) {
            if (atomicAdd(&report->wrong, 1ull) == 0) report->first = (u64)rank << 48 | (u64)round << 24 | i;
        }
    }
    Group::sync();
}

WEFT_DEVICE u8 *buffer(const Rank &me, const Case &test, u32 group, u32 which) { return me.data() + (u64)(group * BUFFERS + which) * test.stride; }

// One that no peer reaches, where there is such memory.
WEFT_DEVICE u8 *own_buffer(const Rank &me, const Case &test, u32 group, u32 which) {
    return test.apart == 0 ? buffer(me, test, group, which) : (u8 *)test.apart + (u64)(me.rank * test.groups + group) * test.stride;
}

// Bytes go round: each rank puts to the next what that looks for, and hears back before it writes to the same place again. Even rounds by `put_signal`, odd ones by a put,
// a quiet and a signal.
template <class Group>
WEFT_DEVICE void exchange(const Team &team, const Case &test) {
    Rank me(team, blockIdx.y);
    Report *report = (Report *)test.report + me.rank;
    u32 group = group_index<Group>();
    if (group >= test.groups || !me.begin()) return;
    u32 next = (me.rank + 1) % team.ranks, before = (me.rank + team.ranks - 1) % team.ranks;
    u64 *came = me.signals() + group * WORDS, *taken = came + 1;
    u8 *from = own_buffer(me, test, group, 2) + test.from_shift;
    for (u32 round = 1; round <= test.rounds; round++) {
        u8 *to = buffer(me, test, group, round % 2) + test.to_shift;
        fill<Group>(from, test.bytes, me.rank, group, round);
        if (round > 2 && !wait<Group>(me, taken, round - 2, next)) return;
        if (round % 2 == 0) {
            put_signal<Group>(me, next, to, from, test.bytes, came, round);
        } else {
            put<Group>(me, next, to, from, test.bytes);
            quiet(me);
            signal<Group>(me, next, came, round);
        }
        if (!wait<Group>(me, came, round, before)) return;
        compare<Group>(report, to, test.bytes, before, group, round);
        signal<Group>(me, before, taken, round);
        // What was put may be read until here.
        if (!quiet(me)) return;
        Group::sync();
    }
}

// Everybody writes its own, all meet, everybody gets everybody's, all meet.
template <class Group>
WEFT_DEVICE void collect(const Team &team, const Case &test) {
    Rank me(team, blockIdx.y);
    Report *report = (Report *)test.report + me.rank;
    u32 group = group_index<Group>();
    if (group >= test.groups || !me.begin()) return;
    u8 *own = buffer(me, test, group, 0) + test.from_shift, *got = own_buffer(me, test, group, 1) + test.to_shift;
    for (u32 round = 1; round <= test.rounds; round++) {
        fill<Group>(own, test.bytes, me.rank, group, round);
        if (!barrier<Group>(me, group)) return;
        for (u32 peer = 0; peer < team.ranks; peer++) {
            get<Group>(me, peer, got, own, test.bytes);
            Group::sync();
            compare<Group>(report, got, test.bytes, peer, group, round);
        }
        if (!barrier<Group>(me, group)) return;
    }
}

// Every group adds to a word of every rank's, as often as there are rounds; what the words were before is summed up here.
template <class Group>
WEFT_DEVICE void count(const Team &team, const Case &test) {
    Rank me(team, blockIdx.y);
    Report *report = (Report *)test.report + me.rank;
    u32 group = group_index<Group>();
    if (group >= test.groups || !me.begin()) return;
    u64 *word = me.signals() + 511, sum = 0;
    if (Group::index() == 0) {
        for (u32 round = 0; round < test.rounds; round++) {
            for (u32 peer = 0; peer < team.ranks; peer++) sum += fetch_add(me, peer, word, 1);
        }
    }
    if (Group::index() == 0) atomicAdd(&report->sum, sum);
    if (!wait<Group>(me, word, (u64)test.rounds * test.groups * team.ranks, (me.rank + 1) % team.ranks)) return;
}

// The first rank and the last hand a few bytes back and forth; of the others none takes part. How long each round took is told in cycles.
template <class Group>
WEFT_DEVICE void ping_pong(const Team &team, const Case &test) {
    Rank me(team, blockIdx.y);
    Report *report = (Report *)test.report + me.rank;
    u32 last = team.ranks - 1;
    if ((me.rank != 0 && me.rank != last) || group_index<Group>() > 0 || !me.begin()) return;
    u32 other = last - me.rank;
    u64 *word = me.signals(), began = 0;
    long long began_cycles = 0;
    u32 *took = (u32 *)test.apart;
    u8 *from = buffer(me, test, 0, 2), *to = buffer(me, test, 0, 0);
    u32 warm = test.rounds / 10;
    for (u32 round = 1; round <= test.rounds + warm; round++) {
        if (round == warm + 1) {
            began = clock_ns();
            began_cycles = clock64();
        }
        long long before = clock64();
        if (me.rank == 0) put_signal<Group>(me, other, to, from, test.bytes, word, round);
        if (!wait<Group>(me, word, round, other)) return;
        if (me.rank != 0) put_signal<Group>(me, other, to, from, test.bytes, word, round);
        if (took != nullptr && me.rank == 0 && round > warm && Group::index() == 0) took[round - warm - 1] = (u32)(clock64() - before);
    }
    if (Group::index() == 0) {
        report->took_ns = clock_ns() - began;
        report->sum = clock64() - began_cycles;
    }
    quiet(me);
}

// The first rank puts to the last again and again, and waits until all of it is there; the last waits to hear of that.
template <class Group>
WEFT_DEVICE void flood(const Team &team, const Case &test) {
    Rank me(team, blockIdx.y);
    Report *report = (Report *)test.report + me.rank;
    u32 last = team.ranks - 1, group = group_index<Group>();
    if ((me.rank != 0 && me.rank != last) || group >= test.groups || !me.begin()) return;
    u64 *word = me.signals() + 16 + group;
    if (me.rank == last) {
        wait<Group>(me, word, 1, 0);
        return;
    }
    u8 *from = own_buffer(me, test, group, 2), *to = buffer(me, test, group, 0);
    u64 began = clock_ns();
    // Not always to the same place, if there is room: what overlaps goes one after the other.
    u32 places = 2 * (u64)test.stride >= 4 * (u64)test.bytes ? 4 : 1;
    for (u32 round = 0; round < test.rounds; round++) put<Group>(me, last, to + (u64)(round % places) * test.bytes, from, test.bytes);
    signal<Group>(me, last, word, 1);
    if (quiet(me) && Group::index() == 0) atomicMax(&report->took_ns, clock_ns() - began);
}

// A wait for what nobody sends.
extern "C" __global__ void wait_in_vain(const __grid_constant__ Team team, const __grid_constant__ Case test) {
    Rank me(team, blockIdx.y);
    Report *report = (Report *)test.report + me.rank;
    bool came = wait<Block>(me, me.signals() + 7, 1, (me.rank + 1) % team.ranks);
    // Later ones end at once.
    bool again = wait<Block>(me, me.signals() + 8, 1, (me.rank + 1) % team.ranks);
    if (threadIdx.x == 0) report->sum = 1 + came + again;
}

#define SCOPES(what)                                                                                                                              \
    extern "C" __global__ void what##_thread(const __grid_constant__ Team team, const __grid_constant__ Case test) { what<Thread>(team, test); } \
    extern "C" __global__ void what##_warp(const __grid_constant__ Team team, const __grid_constant__ Case test) { what<Warp>(team, test); }     \
    extern "C" __global__ void what##_block(const __grid_constant__ Team team, const __grid_constant__ Case test) { what<Block>(team, test); }

SCOPES(exchange)
SCOPES(collect)
SCOPES(count)
SCOPES(ping_pong)
SCOPES(flood)
