"""How long things live: what is published, agents, and the groups of agents that are closed."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

import weft
from pair import BLOCK, SECRET


class Bytes(bytearray):
    """A bytearray that can be watched."""


def test_what_is_published_outlives_its_handle(agents):
    target, initiator, peer = agents
    data = Bytes(b"\x07" * BLOCK)
    gone = weakref.ref(data)
    target.publish("kv", target.register(data))
    del data
    gc.collect()
    here = bytearray(BLOCK)
    peer.read(initiator.register(here), peer.region("kv", timeout=10)).wait()
    assert here == b"\x07" * BLOCK
    target.withdraw("kv")
    gc.collect()
    # References are given back by whichever thread of Python comes next.
    [None for _ in range(10)]
    assert gone() is None


def test_what_is_published_ends_with_its_agent():
    data = Bytes(BLOCK)
    gone = weakref.ref(data)
    with weft.Agent("a", secret=SECRET) as agent:
        agent.publish("kv", agent.register(data))
        del data
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_sizes_that_differ_are_an_error_unless_spans_say_otherwise(agents):
    target, initiator, peer = agents
    target.publish("kv", target.register(bytearray(BLOCK)), write=True)
    region = peer.region("kv")
    for nbytes in (BLOCK - 1, BLOCK + 1):
        local = initiator.register(bytearray(nbytes))
        for call in (peer.read, peer.write, peer.prepare_read, peer.prepare_write):
            with pytest.raises(weft.InvalidCall, match=f"{nbytes} bytes .* {BLOCK}"):
                call(local, region)
        with pytest.raises(weft.InvalidCall):
            peer.transfer("read", [(local, None, region, None)])
        assert peer.read(local, region, [(0, 16)]).wait().bytes == 16


def test_memory_of_another_agent_is_told_as_that(agents):
    target, initiator, peer = agents
    target.publish("kv", target.register(bytearray(BLOCK)), write=True)
    with weft.Agent("a third one", secret=SECRET) as other:
        memory = other.register(bytearray(BLOCK))
        for call in (
            lambda: peer.read(memory, peer.region("kv")),
            lambda: peer.write(memory, peer.region("kv")),
            lambda: target.publish("theirs", memory),
        ):
            with pytest.raises(weft.InvalidCall, match="a third one"):
                call()


def ranks(size, job, **settings):
    joined = [None] * size

    def join(rank):
        agent = weft.Agent(f"{job}-{rank}", secret=SECRET, rendezvous="process", rendezvous_job=job, **settings)
        joined[rank] = weft.Communicator(agent, "all", rank, size, timeout=60)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return joined


@pytest.mark.parametrize("transports", ["shared_memory", "tcp"])
def test_closing_an_agent_ends_its_communicator_and_the_others_are_told(transports):
    first, second = ranks(2, f"closing-{transports}", transports=transports)
    first.agent.close()
    with pytest.raises(weft.CollectiveError) as told:
        second.barrier(deadline=3600)
    assert told.value.rank == 0
    with pytest.raises(weft.Stopped):
        first.barrier()
    with pytest.raises(weft.Stopped):
        first.agent.allocate(1)


def test_a_communicator_keeps_its_agent():
    first, second = ranks(2, "kept")
    gc.collect()
    results = [np.full(4, rank, np.float32) for rank in range(2)]
    other = threading.Thread(target=lambda: second.all_reduce(results[1]))
    other.start()
    first.all_reduce(results[0])
    other.join()
    assert results[0].tolist() == [1.0] * 4 == results[1].tolist()


SUM = """
import numpy as np, weft
world = weft.Communicator.from_env(timeout=60)
data = np.full(8, world.rank + 1, np.float32)
world.all_reduce(data)
print(world.rank, world.size, data[0], world.agent.name)
"""


@pytest.mark.parametrize(
    "launcher",
    [
        {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "job@{job}"},
        {"PMI_RANK": "{rank}", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"},
    ],
    ids=["Open MPI", "MPICH"],
)
def test_the_variables_of_mpi_are_enough_on_one_host(launcher, tmp_path):
    """The launchers themselves need not be there: what they leave in the environment is."""
    mine = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_SECRET")
    environment = {name: value for name, value in os.environ.items() if name not in mine and not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    environment |= {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SUM],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {name: value.format(rank=rank, job=os.getpid()) for name, value in launcher.items()},
        )
        for rank in range(3)
    ]
    told = [process.communicate(timeout=120)[0].split() for process in processes]
    assert told == [[str(rank), "3", "6.0", f"world-{rank}"] for rank in range(3)]


def test_what_is_missing_in_the_environment_is_said():
    several = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    script = textwrap.dedent("""
        import weft
        try: weft.Communicator.from_env()
        except weft.RendezvousError as error: print(error)
    """)
    mine = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in mine and not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    run = lambda more: subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean | more, timeout=60).stdout
    assert "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500" in run(several)
    assert "torchrun" in run({})


def test_settings_are_for_an_agent_that_is_made(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with weft.Agent("a", secret=SECRET, rendezvous="process") as agent:
        with pytest.raises(weft.InvalidCall):
            weft.Communicator.from_env(agent=agent, tcp_connections=1)
        assert weft.Communicator.from_env(agent=agent).agent is agent
    with pytest.raises(weft.SettingsError):
        weft.Communicator.from_env(tcp_conections=1)


