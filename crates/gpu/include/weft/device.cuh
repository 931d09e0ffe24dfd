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
// A peer's heap is mapped here, and reached by loads and stores, or it is behind a proxy (`weft::proxy` in Rust): then a call writes a request into a ring in the host's memory, and a thread of
// the host posts it to the peer by whatever transport leads there. The calls are the same; docs/device-api.md says what they cost and what order they keep.
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
enum Failure : u32 { TIMED_OUT = 1, ABORTED = 2, PEER_GAVE_UP = 3, PEER_LOST = 4, REFUSED = 5, BROKEN = 6 };

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
    u64 heap_bytes;
    // Of a team with a proxy: the ring, and the words by which its slots are claimed; else zero. Peers whose heap is at zero are behind it.
    u64 ring;
    u64 claims;
};

// The ring, and what lies beside it. Whoever changes any of it changes `ring.rs` too.
namespace proxy {

static constexpr u32 SLOTS = 256;
static constexpr u32 INLINE_BYTES = 192;
static constexpr u32 STAGE_BYTES = 16384;

enum Act : u32 { PUT = 1, PUT_SIGNAL = 2, GET = 3, SIGNAL = 4, FETCH_ADD = 5 };
// Where the bytes of a request are on this side.
enum Local : u32 { INLINE = 0, HEAP = 1, STAGE = 2 };

struct Descriptor {
    // The number of the request, and one: written last.
    u64 turn;
    u32 act;
    u32 rank;
    u32 peer;
    u32 local;
    u64 to;
    u64 from;
    u64 bytes;
    u64 word;
    u64 value;
};

struct Slot {
    Descriptor asked;
    u8 carried[INLINE_BYTES];
};

// What the host tells of a request: its number and one, and before that what it brought.
struct Ended {
    u64 turn;
    u64 value;
};

struct Ring {
    // All requests with smaller numbers have ended.
    u64 completed;
    u64 unused[31];
    Ended ended[SLOTS];
    Slot slots[SLOTS];
    u8 stages[SLOTS][STAGE_BYTES];
};

// In memory of the device's, because only its own atomics are sure to be some.
struct Claims {
    // The number of the next request.
    u64 head;
    // What was last seen of `Ring::completed`.
    u64 completed;
    u64 unused[14];
    // Whether somebody still reads what a request has brought.
    u64 held[SLOTS];
};

}  // namespace proxy

// Plain words of the machine.

WEFT_DEVICE u64 load_relaxed(const u64 *from) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

WEFT_DEVICE u64 load_acquire(const u64 *from) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
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
                if (other != rank && team->heaps[other] != 0) set_if_zero(&((Control *)team->heaps[other])->failed, (u64)PEER_GAVE_UP | (u64)rank << 8 | (u64)other << 16);
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
    // The number after the last request that this thread has had a part in: what `quiet` waits for.
    u64 asked;

    // `which`: of several ranks that one launch is for.
    WEFT_DEVICE explicit Rank(const Team &team, u32 which = 0) : team(team), rank(team.rank + which), until(0), failed(false), asked(0) {}

    WEFT_DEVICE u8 *heap(u32 peer) const { return (u8 *)team.heaps[peer]; }
    WEFT_DEVICE Control *control(u32 peer) const { return (Control *)team.heaps[peer]; }
    WEFT_DEVICE HostControl *host() const { return (HostControl *)team.host + (rank - team.rank); }

    // What lies in a peer's heap where `mine` lies in this rank's.
    template <class T>
    WEFT_DEVICE T *of(u32 peer, T *mine) const {
        return (T *)((u8 *)mine - heap(rank) + heap(peer));
    }

    // Whether a peer's heap is reached by loads and stores.
    WEFT_DEVICE bool reaches(u32 peer) const { return team.heaps[peer] != 0; }
    // Where something lies in this rank's heap, and whether all of it does.
    WEFT_DEVICE u64 place(const void *mine) const { return (u64)mine - team.heaps[rank]; }
    WEFT_DEVICE bool holds(const void *mine, u64 bytes) const { return place(mine) <= team.heap_bytes && bytes <= team.heap_bytes - place(mine); }
    WEFT_DEVICE proxy::Ring *ring() const { return (proxy::Ring *)team.ring; }
    WEFT_DEVICE proxy::Claims *claims() const { return (proxy::Claims *)team.claims; }

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
    static WEFT_DEVICE u64 first(u64 value) { return value; }
};

struct Warp {
    static WEFT_DEVICE u32 index() { return threadIdx.x % LANES; }
    static WEFT_DEVICE u32 count() { return LANES; }
    static WEFT_DEVICE void sync() { __syncwarp(); }
    static WEFT_DEVICE bool all(bool fine) { return __all_sync(0xffffffffu, fine); }
    static WEFT_DEVICE u64 first(u64 value) { return __shfl_sync(0xffffffffu, value, 0); }
};

struct Block {
    static WEFT_DEVICE u32 index() { return threadIdx.x; }
    static WEFT_DEVICE u32 count() { return blockDim.x; }
    static WEFT_DEVICE void sync() { __syncthreads(); }
    static WEFT_DEVICE bool all(bool fine) { return __syncthreads_and(fine); }
    static WEFT_DEVICE u64 first(u64 value) {
        __shared__ u64 told;
        __syncthreads();
        if (threadIdx.x == 0) told = value;
        __syncthreads();
        return told;
    }
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

// Behind the proxy. One thread of a group asks; all of it brings the bytes.
namespace proxy {

static constexpr u64 NO_TICKET = ~0ull;

// Does something with a copy of the rank, so that the rank itself stays in registers.
template <class Call>
WEFT_DEVICE void aside(Rank &me, Call call) {
    Rank copy(me);
    call(copy);
    me.failed = copy.failed;
    me.asked = copy.asked;
}

// Waits until all requests below a number have ended.
static __device__ __noinline__ bool wait_completed(Rank &me, u64 number, u32 peer) {
    Claims *claims = me.claims();
    return look_until(me, peer, [&] {
        if (load_acquire(&claims->completed) >= number) return true;
        u64 completed = load_acquire(&me.ring()->completed);
        asm volatile("red.release.gpu.global.max.u64 [%0], %1;" ::"l"(&claims->completed), "l"(completed) : "memory");
        return completed >= number;
    });
}

// The number of a request, and with it a slot, which is waited for while the ring is full. A team that has failed has none.
static __device__ __noinline__ u64 claim(Rank &me, u32 peer, bool brings) {
    if (me.failed) return NO_TICKET;
    Claims *claims = me.claims();
    u64 ticket = atomicAdd(&claims->head, 1ull);
    u32 slot = ticket % SLOTS;
    if (ticket >= SLOTS) {
        // Whoever had the slot before has been served, and has read what it was brought.
        if (!wait_completed(me, ticket - SLOTS + 1, peer)) return NO_TICKET;
        if (!look_until(me, peer, [&] { return load_acquire(&claims->held[slot]) == 0; })) return NO_TICKET;
    }
    if (brings) store_relaxed(&claims->held[slot], 1);
    return ticket;
}

// Makes a request known, after what the group has written for it.
static __device__ __noinline__ void publish(Rank &me, u64 ticket, const Descriptor &asked) {
    u64 *to = (u64 *)&me.ring()->slots[ticket % SLOTS].asked;
    const u64 *from = (const u64 *)&asked;
    for (u32 word = 1; word < sizeof(Descriptor) / sizeof(u64); word++) store_relaxed(to + word, from[word]);
    me.fence();
    store_relaxed(to, ticket + 1);
}

// Waits for what a request brings. Whoever has read it lets go of the slot.
static __device__ __noinline__ bool wait_ended(Rank &me, u64 ticket, u32 peer) {
    Ended *ended = &me.ring()->ended[ticket % SLOTS];
    bool fine = look_until(me, peer, [&] { return load_relaxed(&ended->turn) == ticket + 1; });
    me.fence();
    return fine;
}

WEFT_DEVICE void let_go(Rank &me, u64 ticket) {
    me.fence();
    store_relaxed(&me.claims()->held[ticket % SLOTS], 0);
}

// A put of any length; of the last part, with a word that is set afterwards where one is given.
template <class Group>
static __device__ __noinline__ void post_put(Rank &me, u32 peer, void *to, const void *from, u64 bytes, u64 *word, u64 value) {
    bool own = me.holds(from, bytes);
    Descriptor asked = {0, PUT, me.rank, peer, HEAP, me.place(to), 0, 0, 0, 0};
    for (;;) {
        u64 part = own || bytes < STAGE_BYTES ? bytes : STAGE_BYTES;
        u64 ticket = Group::index() == 0 ? claim(me, peer, false) : 0;
        ticket = Group::first(ticket);
        if (ticket == NO_TICKET) {
            me.failed = true;
            return;
        }
        Slot *slot = &me.ring()->slots[ticket % SLOTS];
        // The heap is the host's: the proxy reads it sooner than this would over the bus.
        asked.local = own ? HEAP : part <= INLINE_BYTES ? INLINE : STAGE;
        asked.from = own ? me.place(from) : 0;
        asked.bytes = part;
        if (asked.local != HEAP) copy<Group>(asked.local == INLINE ? slot->carried : me.ring()->stages[ticket % SLOTS], from, part);
        if (part == bytes && word != nullptr) {
            asked.act = PUT_SIGNAL;
            asked.word = me.place(word);
            asked.value = value;
        }
        Group::sync();
        if (Group::index() == 0) publish(me, ticket, asked);
        me.asked = ticket + 1;
        if (part == bytes) return;
        asked.to += part;
        from = (const u8 *)from + part;
        bytes -= part;
    }
}

template <class Group>
static __device__ __noinline__ void post_get(Rank &me, u32 peer, void *to, const void *from, u64 bytes) {
    bool own = me.holds(to, bytes);
    u64 at = me.place(from);
    while (bytes > 0) {
        u64 part = own || bytes < STAGE_BYTES ? bytes : STAGE_BYTES;
        u64 ticket = NO_TICKET;
        bool fine = true;
        Group::sync();
        if (Group::index() == 0) {
            ticket = claim(me, peer, true);
            fine = ticket != NO_TICKET;
            if (fine) {
                publish(me, ticket, {0, GET, me.rank, peer, own ? HEAP : STAGE, own ? me.place(to) : 0, at, part, 0, 0});
                fine = wait_ended(me, ticket, peer);
            }
        }
        ticket = Group::first(ticket);
        if (!Group::all(fine)) {
            me.failed = true;
            return;
        }
        me.fence();
        if (!own) copy<Group>(to, me.ring()->stages[ticket % SLOTS], part);
        Group::sync();
        if (Group::index() == 0) let_go(me, ticket);
        to = (u8 *)to + part;
        at += part;
        bytes -= part;
    }
}

// Sets a word of a peer's behind the proxy, by one thread.
static __device__ __noinline__ void post_signal(Rank &me, u32 peer, u64 *word, u64 value) {
    u64 ticket = claim(me, peer, false);
    me.failed = ticket == NO_TICKET;
    if (me.failed) return;
    publish(me, ticket, {0, SIGNAL, me.rank, peer, INLINE, 0, 0, 0, me.place(word), value});
    me.asked = ticket + 1;
}

static __device__ __noinline__ u64 post_fetch_add(Rank &me, u32 peer, u64 *word, u64 value) {
    u64 ticket = claim(me, peer, true);
    me.failed = ticket == NO_TICKET;
    if (me.failed) return 0;
    publish(me, ticket, {0, FETCH_ADD, me.rank, peer, INLINE, 0, 0, 0, me.place(word), value});
    if (!wait_ended(me, ticket, peer)) return 0;
    u64 before = load_relaxed(&me.ring()->ended[ticket % SLOTS].value);
    let_go(me, ticket);
    return before;
}

}  // namespace proxy

// Writes `bytes` from memory of this rank's to where `to` lies in a peer's heap. They are there for the peer after `quiet` and a signal, or by `put_signal`. Behind the proxy, bytes of this
// rank's heap may still be read until `quiet`; any others have been by the end of the call.
template <class Group>
WEFT_DEVICE void put(Rank &me, u32 peer, void *to, const void *from, u64 bytes) {
    if (me.reaches(peer)) {
        copy<Group>(me.of(peer, (u8 *)to), from, bytes);
    } else {
        Group::sync();
        proxy::aside(me, [&](Rank &me) { proxy::post_put<Group>(me, peer, to, from, bytes, nullptr, 0); });
    }
}

// Reads `bytes` from where `from` lies in a peer's heap. That they are there already is for a wait to see to.
template <class Group>
WEFT_DEVICE void get(Rank &me, u32 peer, void *to, const void *from, u64 bytes) {
    if (me.reaches(peer)) {
        copy<Group>(to, me.of(peer, (const u8 *)from), bytes);
    } else {
        proxy::aside(me, [&](Rank &me) { proxy::post_get<Group>(me, peer, to, from, bytes); });
    }
}

// What the calling thread has put is there, for everybody who hears of it from this thread later. False where it never will be.
WEFT_DEVICE bool quiet(Rank &me) {
    if (me.asked != 0) {
        proxy::aside(me, [](Rank &me) {
            if (proxy::wait_completed(me, me.asked, me.rank)) me.asked = 0;
        });
    }
    me.fence();
    return !me.failed;
}

// Sets a peer's word, after everything that the group has put and read before.
template <class Group>
WEFT_DEVICE void signal(Rank &me, u32 peer, u64 *word, u64 value) {
    Group::sync();
    if (Group::index() == 0) {
        if (!me.reaches(peer)) {
            proxy::aside(me, [&](Rank &me) { proxy::post_signal(me, peer, word, value); });
        } else if (quiet(me)) {
            store_relaxed(me.of(peer, word), value);
        }
    }
}

// Puts, and then sets a word: whoever has waited for the word finds the bytes.
template <class Group>
WEFT_DEVICE void put_signal(Rank &me, u32 peer, void *to, const void *from, u64 bytes, u64 *word, u64 value) {
    if (me.reaches(peer)) {
        put<Group>(me, peer, to, from, bytes);
        signal<Group>(me, peer, word, value);
    } else {
        Group::sync();
        proxy::aside(me, [&](Rank &me) { proxy::post_put<Group>(me, peer, to, from, bytes, word, value); });
    }
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

// Adds to a peer's word, after what this thread has done before, and tells what it was. In a team with a proxy the host's CPUs add, to whomever's words: they and a device's atomics would not
// see each other. Zero where the team has failed.
WEFT_DEVICE u64 fetch_add(Rank &me, u32 peer, u64 *word, u64 value) {
    u64 before;
    if (me.team.ring != 0) {
        proxy::aside(me, [&](Rank &me) { before = proxy::post_fetch_add(me, peer, word, value); });
        return before;
    }
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
        // Those behind the proxy first: it takes them longer, and keeps them behind what was put. The others are told when that is there.
        u64 asked = me.asked;
        if (me.team.ring != 0) {
            proxy::aside(me, [&](Rank &me) {
                for (u32 peer = 0; peer < me.team.ranks; peer++) {
                    if (!me.reaches(peer)) proxy::post_signal(me, peer, &words->came[me.rank], round);
                }
            });
            u64 told = me.asked;
            me.asked = asked;
            asked = told;
        }
        fine = quiet(me);
        me.asked = asked;
        for (u32 peer = 0; peer < me.team.ranks && fine; peer++) {
            if (me.reaches(peer)) store_relaxed(&me.of(peer, words)->came[me.rank], round);
        }
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
