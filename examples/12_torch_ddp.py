"""Data-parallel training: torchrun --nproc-per-node=2 examples/12_torch_ddp.py"""
import torch, torch.distributed as dist, weft.torch

dist.init_process_group("weft")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(200):
    inputs = torch.randn(32, 8)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss, dist.ReduceOp.AVG)
if dist.get_rank() == 0 and loss < 1e-3:
    print(f"{dist.get_world_size()} ranks over {dist.get_backend()} have learned it")
dist.destroy_process_group()
