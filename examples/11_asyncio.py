"""Blocks of a NumPy cache pushed to another agent with asyncio, and a notification after them."""
import asyncio

import numpy
import weft

BLOCK, BLOCKS = 16 << 10, 256


async def prefill(address: str) -> None:
    with weft.Agent("prefill") as agent:
        cache = numpy.full(BLOCK * BLOCKS, 7, dtype=numpy.uint8)
        peer = await agent.connect_async(address)
        kv = await peer.region_async("kv")
        # Our blocks 3, 1 and 4 become decode's blocks 100, 42 and 7.
        here, there = (BLOCK, [3, 1, 4]), (BLOCK, [100, 42, 7])
        memory = agent.register(cache)
        try:
            await peer.write(memory, kv, there, local_spans=here, deadline=5.0, notify=b"request 17")
        except weft.TransferError as error:
            print(f"{error.peer} over {error.transport}: {error.bytes_done} of {error.bytes_total} bytes; {error.cause}")


async def main() -> None:
    with weft.Agent("decode") as agent:
        cache = agent.allocate(BLOCK * BLOCKS)
        agent.publish("kv", cache, write=True)
        sender = asyncio.create_task(prefill(agent.address))
        notification = await agent.notification_async()
        blocks = numpy.frombuffer(cache, dtype=numpy.uint8).reshape(BLOCKS, BLOCK)
        print(f"{notification.peer.name} says {notification.payload!r}; block 42 holds {blocks[42].mean():.0f}")
        await sender


asyncio.run(main())
