"""Two agents and what they publish, as most tests want them."""

import contextlib

import weft

SECRET = "the secret of the tests"
BLOCK = 4096


@contextlib.contextmanager
def two_agents(transport):
    with weft.Agent("target", secret=SECRET, transports=transport) as target:
        with weft.Agent("initiator", secret=SECRET, transports=transport) as initiator:
            yield target, initiator, initiator.connect(target.address)


def published(agent, name, array, **access):
    memory = agent.register(array)
    agent.publish(name, memory, **access)
    return memory
