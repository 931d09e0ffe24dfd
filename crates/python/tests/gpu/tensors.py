"""Tensors on a GPU in transfers between two processes: the part of the GPU's tests that needs torch. Run by the bundle of `cargo xtask gpu-test`."""

import multiprocessing
import os
import time

import torch
import weft

BLOCKS, BLOCK = 2048, 16384


def agent(name, transports="shared_memory"):
    return weft.Agent(f"{name}-{os.getpid()}", secret="of the tests of tensors", transports=transports, listen="127.0.0.1:0")


def owner(addresses, answers, orders):
    """Has a cache on the GPU, and says what is in it when it is asked."""
    me = agent("owner", "shared_memory,tcp")
    cache = torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8, device="cuda")
    held = me.register(cache)
    me.publish("cache", held, write=True)
    addresses.put(me.address)
    while (order := orders.get()) != "end":
        if order == "fill":
            cache.copy_(torch.arange(BLOCKS, device="cuda", dtype=torch.uint8)[:, None].expand(BLOCKS, BLOCK))
        torch.cuda.synchronize()
        answers.put(cache.sum(dim=1, dtype=torch.int64).cpu().tolist())


def main():
    context = multiprocessing.get_context("spawn")
    addresses, answers, orders = context.Queue(), context.Queue(), context.Queue()
    other = context.Process(target=owner, args=(addresses, answers, orders), daemon=True)
    other.start()
    me = agent("user")
    peer = me.connect(addresses.get(timeout=60))
    region = peer.region("cache", 20)

    mine = torch.randint(0, 255, (BLOCKS, BLOCK), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    held = me.register(mine)
    assert held.device == 0 and held.nbytes == BLOCKS * BLOCK
    peer.write(held, region, checksum=True).wait()
    orders.put("say")
    assert answers.get(timeout=60) == mine.sum(dim=1, dtype=torch.int64).cpu().tolist()
    print("a tensor of another process was written by blocks")

    # What is on the stream comes first, though nobody has waited for it.
    for _ in range(20):
        value = torch.randn(4096, 4096, device="cuda")
        for _ in range(10):
            value = value @ value / 64
        mine.fill_(int(time.time_ns()) % 251)
        transfer = peer.write(held, region, stream=torch.cuda.current_stream())
        transfer.wait()
        orders.put("say")
        assert answers.get(timeout=60) == mine.sum(dim=1, dtype=torch.int64).cpu().tolist()
    print("transfers come after what was on the stream")

    orders.put("fill")
    answers.get(timeout=60)
    near = list(range(0, BLOCKS, 2))
    spans = [(block * BLOCK, BLOCK) for block in near]
    mine.zero_()
    torch.cuda.synchronize()
    peer.read(held, region, spans).wait()
    assert all(int(mine[block][7]) == block % 256 for block in near) and int(mine[1].sum()) == 0
    print("blocks of another process were read, and nothing else was touched")

    # Memory of our own kinds: pages of the host, and what Weft allocates on the device.
    host = torch.empty(BLOCKS * BLOCK, dtype=torch.uint8)
    held_host = me.register(host)
    me.copy(held, held_host, checksum=True).wait()
    assert torch.equal(host, mine.cpu().flatten())
    # Memory of the host that torch has pinned: DLPack calls it CUDA's, and it is the host's.
    pinned = torch.empty(BLOCKS * BLOCK, dtype=torch.uint8, pin_memory=True)
    held_pinned = me.register(pinned)
    assert held_pinned.device is None and held_pinned.nbytes == BLOCKS * BLOCK
    me.copy(held, held_pinned, checksum=True).wait()
    assert torch.equal(pinned, mine.cpu().flatten())
    print("copies to memory that was pinned")
    own = me.allocate(BLOCKS * BLOCK, device=0)
    me.copy(held_host, own).wait()
    assert torch.equal(torch.as_tensor(own, device="cuda"), mine.flatten())
    print("copies between the host and the device")

    try:
        me.allocate(1 << 20, device=99)
    except weft.GpuError as error:
        print("refused:", error)
    else:
        raise AssertionError("there is no GPU 99")
    orders.put("end")
    other.join(20)
    print("all of it passed")


if __name__ == "__main__":
    main()
