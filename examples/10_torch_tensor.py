"""A torch tensor of one process, read by another."""
import multiprocessing, torch, weft

def reader(address):
    tensor, agent = torch.zeros(1 << 20), weft.Agent("reader")
    peer = agent.connect(address)
    summary = peer.read(agent.register(tensor), peer.region("weights"), checksum=True).wait()
    print(f"{summary.bytes} bytes over {summary.transport}; the last element is {tensor[-1]:.0f}")

if __name__ == "__main__":
    agent = weft.Agent("owner")
    agent.publish("weights", agent.register(torch.arange(1 << 20, dtype=torch.float32)))
    multiprocessing.get_context("spawn").Pool(1).apply(reader, [agent.address])
