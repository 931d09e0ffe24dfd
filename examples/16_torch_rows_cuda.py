"""A layer of a model that is split over GPUs: norms fused with all-reduces, and experts on all ranks: torchrun --nproc-per-node=2 examples/16_torch_rows_cuda.py"""
import os, torch, torch.distributed as dist, weft.torch

if not torch.cuda.is_available():
    raise SystemExit("this example needs a GPU")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("weft")
rank, ranks = dist.get_rank(), dist.get_world_size()
tokens, hidden, each = 16, 1024, 4
norm = weft.torch.FusedNorm()
moe = weft.torch.Moe(hidden=hidden, experts=each * ranks, top_k=2, tokens_max=tokens)

@torch.no_grad()
def layer(partial, residual, weight, chosen, gate):
    # The parts of all ranks, the residual and the norm: one kernel.
    x, residual = norm(partial, residual, weight)
    # Each token to the ranks of its experts, and what they made of it back: one kernel each.
    received = moe.dispatch(x, chosen, gate)
    moe.results.copy_(received.rows * 2)  # The experts: here they double.
    return moe.combine(moe.results, gate), residual

torch.manual_seed(1)
partial, residual = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
chosen = torch.rand(tokens, each * ranks, device="cuda").topk(2).indices
gate = torch.full((tokens, 2), 0.5, device="cuda")
y, after = layer(partial, residual, weight, chosen, gate)

# The same in a graph.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    again, _ = layer(partial, residual, weight, chosen, gate)
graph.replay()
torch.cuda.synchronize()
moe.check()

x = torch.nn.functional.rms_norm(after.float(), (hidden,), eps=1e-6)
close = torch.allclose(y.float(), 2 * x, rtol=0.02, atol=0.02) and torch.equal(y, again)
if rank == 0:
    print(f"{ranks} ranks: every token doubled by its experts: {close}")
dist.destroy_process_group()
