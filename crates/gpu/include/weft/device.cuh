// What kernels say to other ranks whose memory they reach: puts, gets, signals, waits and barriers over a symmetric heap.
//
// Header only, with no include of its own: for nvcc and for NVRTC, from sm_80 on. The host makes a team (`weft_gpu::Team`) and passes it to a kernel by value; the
// kernel makes a `weft::Rank` of it in every thread, and calls the functions below with that.
//
//     extern "C" __global__ void hand_on(const __grid_constant__ weft::Team team, float *mine, weft::u64 *arrived, weft::u64 round) {
//         weft::Rank me(team);
//         weft::u32 next = (me.rank + 1) % team.ranks;
//         weft::put_signal<weft::Block>(me, next, mine + 1024, mine, 1024 * sizeof(float), arrived, round);
//         if (!weft::wait<weft::Block>(me, arrived, round, (me.rank + team.ranks - 1) % team.ranks)) return;
//         // what the rank before this one had in `mine` is now in `mine + 1024`
//     }
//
// Addresses of the heap are those of the rank that calls; what lies at the same place of a peer's heap is found by `Rank::of`.
//
// No wait lasts for ever. A wait that has lasted longer than the team's deadline, that the host has aborted, or whose team a peer has given up, returns false; so does every later one
// of that thread. Why is written into the host's memory, where `Team::check` reads it, and every peer is told. A kernel that is told so ends; what it was to write is then anything.
#ifndef WEFT_DEVICE_CUH
#define WEFT_DEVICE_CUH

#define WEFT_DEVICE __device__ __forceinline__

namespace weft {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static constexpr u32 RANKS_MAX = 8;
static constexpr u32 LANES = 32;
// So many looks between two at the clock, and so many between two at the host's memory, which is a microsecond away.
static constexpr u32 LOOKS_A_CLOCK = 64;
static constexpr u32 LOOKS_A_HOST = 1024;

// Why a wait has ended without what it was waiting for. The numbers are those of `team.rs`.
enum Failure : u32 { TIMED_OUT = 1, ABORTED = 2, PEER_GAVE_UP = 3 };

// The beginning of every rank's heap. Whoever changes it changes `layout.rs` too.
struct Control {
    // How many collectives there have been, times 65,536: every block adds its share when it ends, so that the number changes when the last one has.
    u64 calls;
    // The first failure that this rank has seen, or has been told of: the kind, the rank that it is about, and the rank that saw it, a byte each. Zero while all is well.
    u64 failed;
    u64 unused[14];
};

// Memory of the host's, one for each of its ranks.
struct HostControl {
    // Set by the host: all waits are to end.
    u64 abort;
    // Set by kernels: as in `Control`.
    u64 failed;
    u64 unused[14];
};

// As the host passes it; the same fields as `TeamView` in `team.rs`.
struct Team {
    // The rank that this launch is of, or the first of several.
    u32 rank;
    u32 ranks;
    // Whether some rank is in another process or on another device, so that fences have to reach there.
    u32 far;
    u32 unused;
    u64 timeout_ns;
    // `HostControl` of `rank`; those of the ranks after it follow.
    u64 host;
    // Where each rank's heap lies, as this process maps it.
    u64 heaps[RANKS_MAX];
    // Where things lie in a heap.
    u64 barriers_at;
    u64 ends_at;
    u64 records_at;
    u64 windows_at;
    u64 packets_at;
    u64 packets_a_rank;
    u64 signals_at;
    u64 data_at;
};

// Plain words of the machine.

WEFT_DEVICE u64 load_relaxed(const u64 *from) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

WEFT_DEVICE void store_relaxed(u64 *to, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Two words at once, each of them whole; the two may be of different times.
WEFT_DEVICE void load_pair(const void *from, u64 &a, u64 &b) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}

WEFT_DEVICE void store_pair(void *to, u64 a, u64 b) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

// Sets a word that is zero, and tells what it was.
WEFT_DEVICE u64 set_if_zero(u64 *word, u64 value) {
    u64 before;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], 0, %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
}

// Nanoseconds, of a clock that all multiprocessors share.
WEFT_DEVICE u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// Looks at the clock, at what others have found and, now and then, at the host's word: until when the caller may go on waiting for `peer`, or 0 when it may not. `until` is what
// this told it before, or 0. Whoever is the first of its rank to give up tells every peer. Rarely called, and of no use to whoever has no time, so it is not written out where it is called.
static __device__ __noinline__ u64 patience(const Team *team, u32 rank, u32 looks, u32 peer, u64 until) {
    u64 now = clock_ns();
    u64 *failed = &((Control *)team->heaps[rank])->failed;
    HostControl *host = (HostControl *)team->host + (rank - team->rank);
    if (until == 0) until = now + team->timeout_ns;
    u64 word = load_relaxed(failed);
    if (word == 0) {
        u64 kind = now >= until ? TIMED_OUT : looks % LOOKS_A_HOST == 0 && load_relaxed(&host->abort) != 0 ? ABORTED : 0;
        if (kind == 0) return until;
        u64 own = kind | (u64)peer << 8 | (u64)rank << 16;
        word = set_if_zero(failed, own);
        if (word == 0) {
            word = own;
            for (u32 other = 0; other < team->ranks; other++) {
                if (other != rank) set_if_zero(&((Control *)team->heaps[other])->failed, (u64)PEER_GAVE_UP | (u64)rank << 8 | (u64)other << 16);
            }
        }
    }
    store_relaxed(&host->failed, word);
    return 0;
}

// One rank, as one of its threads sees it.
struct Rank {
    const Team &team;
    const u32 rank;
    // When this thread's patience with the present wait ends: set when it does not end soon.
    u64 until;
    bool failed;

    // `which`: of several ranks that one launch is for.
    WEFT_DEVICE explicit Rank(const Team &team, u32 which = 0) : team(team), rank(team.rank + which), until(0), failed(false) {}

    WEFT_DEVICE u8 *heap(u32 peer) const { return (u8 *)team.heaps[peer]; }
    WEFT_DEVICE Control *control(u32 peer) const { return (Control *)team.heaps[peer]; }
    WEFT_DEVICE HostControl *host() const { return (HostControl *)team.host + (rank - team.rank); }

    // What lies in a peer's heap where `mine` lies in this rank's.
    template <class T>
    WEFT_DEVICE T *of(u32 peer, T *mine) const {
        return (T *)((u8 *)mine - heap(rank) + heap(peer));
    }

    // The words for signals, all zero at first, and the memory that is the application's.
    WEFT_DEVICE u64 *signals() const { return (u64 *)(heap(rank) + team.signals_at); }
    WEFT_DEVICE u8 *data() const { return heap(rank) + team.data_at; }

    // Orders what this thread, and whoever it has met at a barrier of the block, has read and written before what they do afterwards, as the other ranks see it.
    WEFT_DEVICE void fence() const {
        if (team.far) {
            asm volatile("fence.acq_rel.sys;" ::: "memory");
        } else {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
        }
    }

    // Whether this rank's team is still whole: one look, at the beginning of a kernel.
    WEFT_DEVICE bool begin() {
        u64 word = load_relaxed(&control(rank)->failed);
        failed = word != 0;
        if (failed) store_relaxed(&host()->failed, word);
        return !failed;
    }

    // Called by a wait now and then, after so many looks in vain: false when it is to end.
    WEFT_DEVICE bool patient(u32 looks, u32 peer) {
        if (!failed) until = patience(&team, rank, looks, peer, until);
        failed = until == 0;
        return !failed;
    }
};

// Looks until there is what it waits for. `look` is asked again and again, and answers whether it is there; `peer` is to blame if it never is.
template <class Look>
WEFT_DEVICE bool look_until(Rank &me, u32 peer, Look look) {
    if (me.failed) return false;
    me.until = 0;
    u32 looks = 0;
    while (!look()) {
        looks++;
        if (looks % LOOKS_A_CLOCK == 0 && !me.patient(looks, peer)) return false;
    }
    return true;
}

// Who makes a call together: each of these has to be made by all threads of it.

struct Thread {
    static WEFT_DEVICE u32 index() { return 0; }
    static WEFT_DEVICE u32 count() { return 1; }
    static WEFT_DEVICE void sync() {}
    static WEFT_DEVICE bool all(bool fine) { return fine; }
};

struct Warp {
    static WEFT_DEVICE u32 index() { return threadIdx.x % LANES; }
    static WEFT_DEVICE u32 count() { return LANES; }
    static WEFT_DEVICE void sync() { __syncwarp(); }
    static WEFT_DEVICE bool all(bool fine) { return __all_sync(0xffffffffu, fine); }
};

struct Block {
    static WEFT_DEVICE u32 index() { return threadIdx.x; }
    static WEFT_DEVICE u32 count() { return blockDim.x; }
    static WEFT_DEVICE void sync() { __syncthreads(); }
    static WEFT_DEVICE bool all(bool fine) { return __syncthreads_and(fine); }
};

// Copies between any two places that this rank reaches: by sixteen bytes where both begin alike.
template <class Group>
WEFT_DEVICE void copy(void *to, const void *from, u64 bytes) {
    u8 *out = (u8 *)to;
    const u8 *in = (const u8 *)from;
    u64 head = bytes, vectors = 0;
    if ((((u64)out ^ (u64)in) & 15) == 0) {
        head = (16 - ((u64)out & 15)) & 15;
        if (head > bytes) head = bytes;
        vectors = (bytes - head) / 16;
    }
    for (u64 i = Group::index(); i < head; i += Group::count()) out[i] = in[i];
    for (u64 i = Group::index(); i < vectors; i += Group::count()) ((uint4 *)(out + head))[i] = ((const uint4 *)(in + head))[i];
    for (u64 i = head + vectors * 16 + Group::index(); i < bytes; i += Group::count()) out[i] = in[i];
}

// Writes `bytes` from memory of this rank's to where `to` lies in a peer's heap. They are there for the peer after `quiet` and a signal, or by `put_signal`.
template <class Group>
WEFT_DEVICE void put(Rank &me, u32 peer, void *to, const void *from, u64 bytes) {
    copy<Group>(me.of(peer, (u8 *)to), from, bytes);
}

// Reads `bytes` from where `from` lies in a peer's heap. That they are there already is for a wait to see to.
template <class Group>
WEFT_DEVICE void get(Rank &me, u32 peer, void *to, const void *from, u64 bytes) {
    copy<Group>(to, me.of(peer, (const u8 *)from), bytes);
}

// What the calling thread has put is there, for everybody who hears of it from this thread later.
WEFT_DEVICE void quiet(Rank &me) { me.fence(); }

// Sets a peer's word, after everything that the group has put and read before.
template <class Group>
WEFT_DEVICE void signal(Rank &me, u32 peer, u64 *word, u64 value) {
    Group::sync();
    if (Group::index() == 0) {
        me.fence();
        store_relaxed(me.of(peer, word), value);
    }
}

// Puts, and then sets a word: whoever has waited for the word finds the bytes.
template <class Group>
WEFT_DEVICE void put_signal(Rank &me, u32 peer, void *to, const void *from, u64 bytes, u64 *word, u64 value) {
    put<Group>(me, peer, to, from, bytes);
    signal<Group>(me, peer, word, value);
}

// Waits until a word of this rank's own heap holds at least `value`; `peer` is who is expected to set it. Afterwards the group sees what came before the signal.
template <class Group>
WEFT_DEVICE bool wait(Rank &me, const u64 *word, u64 value, u32 peer) {
    bool fine = true;
    if (Group::index() == 0) {
        fine = look_until(me, peer, [&] { return load_relaxed(word) >= value; });
        me.fence();
    }
    fine = Group::all(fine);
    if (!fine) me.failed = true;
    return fine;
}

// Adds to a peer's word, after what this thread has done before, and tells what it was.
WEFT_DEVICE u64 fetch_add(Rank &me, u32 peer, u64 *word, u64 value) {
    u64 before;
    me.fence();
    asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(me.of(peer, word)), "l"(value) : "memory");
    me.fence();
    return before;
}

// One of the barriers in the heap: a count of rounds for the rank itself, and what each rank has come to.
struct BarrierWords {
    u64 came[RANKS_MAX];
    u64 rounds;
    u64 unused[7];
};
static constexpr u32 BARRIERS = 64;

// All ranks meet: what each did before is seen by all afterwards. One group of every rank calls it, with the same `which` below `BARRIERS`.
template <class Group>
WEFT_DEVICE bool barrier(Rank &me, u32 which = 0) {
    BarrierWords *words = (BarrierWords *)(me.heap(me.rank) + me.team.barriers_at) + which;
    Group::sync();
    bool fine = true;
    if (Group::index() == 0) {
        u64 round = words->rounds + 1;
        words->rounds = round;
        me.fence();
        for (u32 peer = 0; peer < me.team.ranks; peer++) store_relaxed(&me.of(peer, words)->came[me.rank], round);
        for (u32 peer = 0; peer < me.team.ranks && fine; peer++) {
            fine = look_until(me, peer, [&] { return load_relaxed(&words->came[peer]) >= round; });
        }
        me.fence();
    }
    fine = Group::all(fine);
    if (!fine) me.failed = true;
    return fine;
}

// Packets: four bytes and the number of a call in one word, so that a reader that finds the number has the bytes, and no fence is needed. Two make a pair, which carries eight bytes.

WEFT_DEVICE void store_packets(void *to, u64 eight, u32 flag) {
    u64 mark = (u64)flag << 32;
    store_pair(to, (eight & 0xffffffffu) | mark, (eight >> 32) | mark);
}

WEFT_DEVICE bool are_marked(u64 a, u64 b, u32 flag) { return (u32)(a >> 32) == flag && (u32)(b >> 32) == flag; }

WEFT_DEVICE u64 eight_of(u64 a, u64 b) { return (a & 0xffffffffu) | b << 32; }

}  // namespace weft

#endif
