// A worker: one launch that carries out an order, and then stays for a moment to carry out the next ones without a launch.
//
// An order is a list of pieces to copy. The first comes with the launch. Where the host asks for it, the blocks stay afterwards: block 0, the foreman, looks at
// the host's mail for the next order, and hands it to the others over a board in the device's memory. It leaves after a while without mail, after a longer while in any
// case, or when it is told to; the others leave when it does. It tells the host which order was the last that it took, and takes none after that, so that both agree on what is
// left to be launched.
//
// Nothing here waits for ever. The foreman's waits end by the clock. The others wait for the foreman, and only once all blocks are known to run: a block that waits for
// blocks which find no room on the device gives up its own room, and then nobody stays.
//
// Words that are read by whoever waits for them carry the number of their order beside what they say, so that nothing has to be written before anything else.

#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Piece {
    u64 to, from, len;
};

static constexpr u32 LANES = 32;
static constexpr u32 WHOLE_WARP = 0xffffffffu;
// So many pieces come with an order; a longer list is read from where it lies.
static constexpr u32 FEW = 4;
static constexpr u32 MAILS = 8;

static constexpr u32 SUMMED = 1;
static constexpr u32 OVER_THE_BUS = 2;
static constexpr u32 LEAVE = 4;

// One word a lane: a warp reads it at once.
struct Order {
    u64 list;
    u32 count, chunks_a_piece, chunk, slot, flags, blocks;
    Piece few[FEW];
};
static_assert(sizeof(Order) == LANES * sizeof(u32), "an order is a word a lane");

// What the blocks of a worker share. The device's own memory.
struct Board {
    // The order that is carried out now, each word with its number.
    u64 words[LANES];
    // The number of the order that has ended last, and whether anybody may stay.
    u64 ended;
    // Blocks that have ended the first order of a launch, and whether one of them has given up; and those that have ended a later one. Zero between orders.
    u32 first_ended, later_ended;
    u64 read, written;
};

static constexpr u32 GAVE_UP = 1u << 31;
static constexpr u64 NOBODY_STAYS = 1ull << 32;

// Where the host looks. Memory of the host, a line of its own for each.
struct Report {
    u64 read, written;
    u32 done, unused;
    u64 room[5];
};

// Of the bytes as they were read, and of the same as they were found where they had been written.
struct Sums {
    u64 read, written;
};

// What a launch is told beside its first order.
struct Terms {
    Board *board;
    // Both are the host's.
    const u64 *mail;
    Report *reports;
    // Where the foreman writes which launch leaves, and which order was the last that it took. The host's.
    u64 *left;
    u32 number, launch;
    // Zero: nobody stays.
    u64 stay_ns, life_ns;
};

// How long a block waits for others of its launch to find room on the device.
static constexpr u64 PATIENCE_NS = 50000;
// A look at the mail crosses the bus; the clock is looked at less often.
static constexpr u32 LOOKS_A_CLOCK = 4;

__device__ __forceinline__ u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ u64 acquire_from_device(const u64 *at) {
    u64 word;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}

__device__ __forceinline__ u64 acquire_from_host(const u64 *at) {
    u64 word;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}

__device__ __forceinline__ void release_to_device(u64 *at, u64 word) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}

__device__ __forceinline__ void release_to_host(u64 *at, u64 word) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}

// A block has carried out its share. The last to do so tells the host, and the foreman. Called by one thread, after a barrier of its block.
__device__ inline void end_share(const Order &order, const Terms &terms, u32 number, bool first, Sums share) {
    Board *board = terms.board;
    bool alone = order.blocks == 1, summed = (order.flags & SUMMED) != 0, nobody_stays = false;
    if (!alone) {
        if (summed) {
            atomicAdd(&board->read, share.read);
            atomicAdd(&board->written, share.written);
        }
        // What the block has written is seen by whoever sees that it has ended.
        if (order.flags & OVER_THE_BUS) {
            asm volatile("fence.acq_rel.sys;" ::: "memory");
        } else {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
        }
        u32 *ended = first ? &board->first_ended : &board->later_ended;
        if ((atomicAdd(ended, 1) & ~GAVE_UP) != order.blocks - 1) return;
        if (first) {
            // Whoever gives up after this finds zero, and stays.
            nobody_stays = (atomicExch(ended, 0) & GAVE_UP) != 0;
        } else {
            *ended = 0;
        }
        if (summed) {
            // What the other blocks have added is there from here on.
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            share = {atomicExch(&board->read, 0), atomicExch(&board->written, 0)};
        }
    }
    Report *report = terms.reports + order.slot;
    if (summed) {
        report->read = share.read;
        report->written = share.written;
    }
    // After what every block has written, and with it.
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(&report->done), "r"(number) : "memory");
    if (terms.stay_ns != 0 && !alone) release_to_device(&board->ended, number | (nobody_stays ? NOBODY_STAYS : 0));
}

// Whether a block that has waited long enough for the first order to end may go. It may not where the order has ended, since it is counted on then.
__device__ inline bool gives_up(Board *board) {
    u32 seen = atomicAdd(&board->first_ended, 0);
    while (seen != 0) {
        u32 found = atomicCAS(&board->first_ended, seen, seen | GAVE_UP);
        if (found == seen) return true;
        seen = found;
    }
    return false;
}

// What a waiting warp has come to: an order in `word`, one word a lane, or the end.
struct Next {
    bool stays;
    u32 number, word;
};

__device__ inline void tell_all_to_leave(const Terms &terms, u32 number, u32 lane) {
    // The flags are one of the words; nothing else of it matters.
    release_to_device(&terms.board->words[lane], (u64)(number + 1) << 32 | LEAVE);
    if (lane == 0) release_to_host(terms.left, (u64)terms.launch << 32 | number);
}

// The foreman: waits until the order has ended, which it has where the foreman was `alone` with it, and then for mail. Called by a whole warp.
__device__ inline Next await_mail(const Terms &terms, u32 number, bool first, bool alone, u64 born, u32 lane) {
    Next next = {false, number, 0};
    u64 since = clock_ns();
    bool leaves = false;
    while (!alone) {
        u64 ended = acquire_from_device(&terms.board->ended);
        if (__all_sync(WHOLE_WARP, (u32)ended == number)) {
            leaves = __any_sync(WHOLE_WARP, first && (ended & NOBODY_STAYS) != 0);
            break;
        }
        if (__any_sync(WHOLE_WARP, first && clock_ns() - since > PATIENCE_NS)) {
            u32 gone = lane == 0 ? gives_up(terms.board) : 0;
            leaves = __shfl_sync(WHOLE_WARP, gone, 0) != 0;
            if (leaves) break;
        }
    }
    next.number = number + 1;
    const u64 *mail = terms.mail + (next.number % MAILS) * LANES + lane;
    since = clock_ns();
    for (u32 looks = 0; !leaves; looks++) {
        if (looks % LOOKS_A_CLOCK == 0) {
            u64 now = clock_ns();
            leaves = __any_sync(WHOLE_WARP, now - since > terms.stay_ns || now - born > terms.life_ns);
            if (leaves) break;
        }
        u64 word = acquire_from_host(mail);
        if (__all_sync(WHOLE_WARP, (u32)(word >> 32) == next.number)) {
            next.word = (u32)word;
            leaves = (__shfl_sync(WHOLE_WARP, next.word, 6) & LEAVE) != 0;
            break;
        }
    }
    next.stays = !leaves;
    if (leaves) {
        tell_all_to_leave(terms, number, lane);
    } else if (__shfl_sync(WHOLE_WARP, next.word, 7) > 1) {
        // What the foreman does alone the others need not know of.
        release_to_device(&terms.board->words[lane], (u64)next.number << 32 | next.word);
    }
    return next;
}

// The others: wait for the foreman. Called by a whole warp.
__device__ inline Next await_board(const Terms &terms, u32 number, bool first, u32 lane) {
    Next next = {false, number, 0};
    u64 since = clock_ns();
    for (;;) {
        u64 word = acquire_from_device(&terms.board->words[lane]);
        u32 found = (u32)(word >> 32);
        u32 foremost = __shfl_sync(WHOLE_WARP, found, 0);
        // Orders in between were not for this block.
        if (__all_sync(WHOLE_WARP, found == foremost && (int)(found - number) > 0)) {
            next.number = found;
            next.word = (u32)word;
            next.stays = (__shfl_sync(WHOLE_WARP, next.word, 6) & LEAVE) == 0;
            return next;
        }
        if (__any_sync(WHOLE_WARP, first && clock_ns() - since > PATIENCE_NS)) {
            u32 gone = lane == 0 ? gives_up(terms.board) : 0;
            if (__shfl_sync(WHOLE_WARP, gone, 0)) return next;
            // Everybody runs, so that whatever comes now comes from the foreman, whose own waits end.
            first = false;
        }
    }
}

// Copies every `step`th chunk of an order from `unit` on, and tells the sums of a thread where they are asked for. Called by a whole warp. In `copy.cu`.
__device__ __forceinline__ Sums copy_share(const Order &order, const Piece *pieces, u32 unit, u32 step);

// The life of a block.
__device__ __forceinline__ void work(const Order &first_order, const Terms &terms) {
    __shared__ Order order;
    __shared__ Sums shares[LANES];
    __shared__ u32 next_number, stays;
    u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = blockDim.x / LANES;
    u32 number = terms.number;
    u64 born = clock_ns();
    if (warp == 0) ((u32 *)&order)[lane] = ((const u32 *)&first_order)[lane];
    __syncthreads();
    for (bool first = true;; first = false) {
        if (blockIdx.x < order.blocks) {
            const Piece *pieces = order.list ? (const Piece *)order.list : order.few;
            // Neighbouring chunks go to different blocks, so that few of them keep many busy.
            Sums share = copy_share(order, pieces, warp * order.blocks + blockIdx.x, order.blocks * warps);
            if (order.flags & SUMMED) {
                for (u32 step = LANES / 2; step > 0; step /= 2) {
                    share.read += __shfl_xor_sync(WHOLE_WARP, share.read, step);
                    share.written += __shfl_xor_sync(WHOLE_WARP, share.written, step);
                }
                if (lane == 0) shares[warp] = share;
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                if (order.flags & SUMMED) {
#pragma unroll 1
                    for (u32 other = 1; other < warps; other++) {
                        share.read += shares[other].read;
                        share.written += shares[other].written;
                    }
                }
                end_share(order, terms, number, first, share);
            }
        }
        if (terms.stay_ns == 0) return;
        // Nobody reads the order any more that is about to be overwritten.
        __syncthreads();
        if (warp == 0) {
            Next next = blockIdx.x == 0 ? await_mail(terms, number, first, order.blocks == 1, born, lane) : await_board(terms, number, first, lane);
            ((u32 *)&order)[lane] = next.word;
            if (lane == 0) {
                next_number = next.number;
                stays = next.stays;
            }
        }
        __syncthreads();
        if (!stays) return;
        number = next_number;
    }
}
