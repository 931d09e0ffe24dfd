// The same copies for devices that move bulk by themselves, through the memory of their multiprocessors: one lane of a warp sends a chunk on its way in, and out again when it
// has come, a few chunks at a time. It takes four warps a multiprocessor and hardly a register, but 128 KiB of its memory. Sums, and pieces that do not begin
// where vectors do, are none of its business.

#include "worker.cuh"

static constexpr u32 WARPS = 4;
static constexpr u32 STAGES = 4;
// Chunks of a warp that are on their way in.
static constexpr u32 AHEAD = 3;
static constexpr u32 STAGE_BYTES = 8192;

// Where a chunk goes that is in a stage, or is on its way there.
struct Bound {
    u64 to;
    u32 bytes;
};

__device__ __forceinline__ u32 near_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void send_in(void *stage, u64 from, u32 bytes, u64 *barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(near_address(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(near_address(stage)), "l"(from), "r"(bytes), "r"(near_address(barrier)) : "memory");
}

__device__ __forceinline__ void await_in(u64 *barrier, u32 phase) {
    u32 come = 0;
    while (!come) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(come)
            : "r"(near_address(barrier)), "r"(phase)
            : "memory");
    }
}

__device__ __forceinline__ void send_out(u64 to, const void *stage, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(near_address(stage)), "r"(bytes) : "memory");
}

struct Bulk {
    u8 *stages;
    u64 *barriers;
    Bound *bound;
    // Of each stage, which way its barrier turns next.
    u32 phases;

    __device__ __forceinline__ Sums copy(const Order &order, const Piece *pieces, u32 unit, u32 step) {
        u32 lane = threadIdx.x % LANES;
        u32 chunks_a_piece = order.chunks_a_piece, chunk = order.chunk, units = order.count * chunks_a_piece;
        // What others have written by ordinary stores is read past them.
        asm volatile("fence.proxy.async;" ::: "memory");
        if (lane == 0) {
            u32 begun = 0, ended = 0;
            for (; unit < units || ended < begun;) {
                if (unit < units && begun - ended < AHEAD) {
                    Piece piece = pieces[unit / chunks_a_piece];
                    u64 at = (u64)(unit % chunks_a_piece) * chunk;
                    unit += step;
                    if (at >= piece.len) continue;
                    u32 stage = begun % STAGES, bytes = (u32)min((u64)chunk, piece.len - at);
                    // The last chunk but `STAGES` was in this stage, and has been sent out; of those after it as many as are allowed to may still be read.
                    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STAGES - AHEAD) : "memory");
                    bound[stage] = {piece.to + at, bytes};
                    send_in(stages + stage * STAGE_BYTES, piece.from + at, bytes, barriers + stage);
                    begun++;
                    continue;
                }
                u32 stage = ended % STAGES;
                await_in(barriers + stage, phases >> stage & 1);
                phases ^= 1u << stage;
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                send_out(bound[stage].to, stages + stage * STAGE_BYTES, bound[stage].bytes);
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                ended++;
            }
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        __syncwarp();
        return {0, 0};
    }
};

extern "C" __global__ void __launch_bounds__(WARPS *LANES, 1) weft_copy_bulk(const __grid_constant__ Order order, const __grid_constant__ Terms terms) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(8) u64 barriers[WARPS * STAGES];
    __shared__ Bound bound[WARPS * STAGES];
    u32 warp = threadIdx.x / LANES;
    Bulk hands = {memory + warp * STAGES * STAGE_BYTES, barriers + warp * STAGES, bound + warp * STAGES, 0};
    if (threadIdx.x % LANES == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(near_address(hands.barriers + stage)) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    work(order, terms, hands);
}
