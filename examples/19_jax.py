"""JAX arrays of one process, read by another: neither end copies anything on the way to or from JAX."""
import multiprocessing, jax, jax.numpy as jnp, numpy, weft

def reader(address):
    agent = weft.Agent("reader")
    peer = agent.connect(address)
    theirs = peer.region("weights")
    memory = agent.allocate(theirs.nbytes)
    summary = peer.read(memory, theirs, checksum=True).wait()
    # JAX takes arrays for constant, so nothing is read into this memory again as long as there is one.
    weights = jnp.from_dlpack(numpy.frombuffer(memory, numpy.float32))
    total = jax.jit(lambda array: (array * 2).sum())(weights)
    print(f"{summary.bytes} bytes over {summary.transport}; twice their sum is {total:.0f}")

if __name__ == "__main__":
    agent = weft.Agent("owner")
    agent.publish("weights", agent.register(jnp.ones(1 << 20), writable=False))
    multiprocessing.get_context("spawn").Pool(1).apply(reader, [agent.address])
