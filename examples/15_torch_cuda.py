"""Tensors of a GPU, which the ranks may share: torchrun --nproc-per-node=2 examples/15_torch_cuda.py"""
import os, torch, torch.distributed as dist, weft.torch

if not torch.cuda.is_available():
    raise SystemExit("this example needs a GPU")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("weft")
rank, ranks = dist.get_rank(), dist.get_world_size()

# On the current stream: nothing here waits for the device.
gradient = torch.full((1 << 20,), float(rank), device="cuda")
dist.all_reduce(gradient, dist.ReduceOp.AVG)
work = dist.all_reduce(gradient, async_op=True)
work.wait()  # The current stream waits, the host does not.

# In a graph: as quick as kernels can be.
hidden = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dist.all_reduce(hidden)
    hidden.div_(ranks)
for _ in range(100):
    graph.replay()

torch.cuda.synchronize()
if rank == 0:
    same = gradient[0].item() == ranks * (ranks - 1) / 2 and hidden[0].item() == 1
    print(f"{ranks} ranks over {dist.get_backend()} agree: {same}")
dist.destroy_process_group()
