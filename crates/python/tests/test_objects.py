"""Objects as places of an agent, on a server of S3 in a process of its own (`cargo build -p weft-testing-s3`)."""

import os
import pathlib
import socket
import subprocess
import time

import numpy as np
import pytest

import weft
from needs import KNOWN, leave_out

LENGTH = 4 << 20
PROGRAM = pathlib.Path(__file__).parents[3] / "target/debug/weft-testing-s3"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    if not PROGRAM.exists():
        why = "no server of S3: cargo build -p weft-testing-s3"
        leave_out("s3", __file__, why)
        pytest.skip(f"{KNOWN}{why}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([PROGRAM, str(port), tmp_path_factory.mktemp("buckets")])
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            assert server.poll() is None
            time.sleep(0.02)
    # Those of the server; see `testing/s3`.
    os.environ["AWS_ACCESS_KEY_ID"] = "GK0123456789abcdef01234567"
    os.environ["AWS_SECRET_ACCESS_KEY"] = "0123456789abcdef" * 4
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def test_a_spill_to_a_bucket_comes_back_as_it_was(endpoint):
    wanted = np.random.default_rng(7).integers(0, 256, LENGTH, dtype=np.uint8)
    with weft.Agent("objects", object_endpoint=endpoint, object_region="garage") as agent:
        place = agent.open_object("s3://blocks/spill", LENGTH)
        assert (place.kind, place.nbytes, place.device, place.writable) == ("object", LENGTH, None, True)
        assert "of an object" in repr(place)
        agent.copy(agent.register(wanted), place, checksum=True, commit=True).wait()
        there = agent.open_object("s3://blocks/spill", endpoint=endpoint, region="garage")
        found = np.zeros(LENGTH, dtype=np.uint8)
        agent.copy(there, agent.register(found), checksum=True).wait()
        assert (found == wanted).all()
        with pytest.raises(weft.Error):
            agent.open_object("s3://blocks/nothing")
        with pytest.raises(weft.InvalidCall, match="s3://BUCKET"):
            agent.open_object("blocks/nothing", 1)
        with pytest.raises(BufferError):
            memoryview(place)
