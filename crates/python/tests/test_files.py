"""Files as places of an agent."""

import numpy as np
import pytest

import weft

LENGTH = 4 << 20


@pytest.fixture
def agent():
    with weft.Agent("files") as agent:
        yield agent


def pattern():
    return np.random.default_rng(7).integers(0, 256, LENGTH, dtype=np.uint8)


def test_a_spill_comes_back_as_it_was(agent, tmp_path):
    file = agent.open_file(tmp_path / "spill", LENGTH)
    assert (file.kind, file.nbytes, file.device, file.writable) == ("file", LENGTH, None, True)
    wanted = pattern()
    agent.copy(agent.register(wanted), file, checksum=True).wait()
    found = np.zeros(LENGTH, dtype=np.uint8)
    agent.copy(file, agent.register(found), checksum=True).wait()
    assert (found == wanted).all()
    assert (np.fromfile(tmp_path / "spill", dtype=np.uint8) == wanted).all()


def test_blocks_are_put_and_fetched_by_their_numbers(agent, tmp_path):
    block = 64 << 10
    file = agent.open_file(str(tmp_path / "blocks"), LENGTH)
    wanted = pattern()
    there = list(reversed(range(8)))
    agent.copy(
        agent.register(wanted), file, source_spans=(block, range(8)), target_spans=(block, there)
    ).wait()
    found = np.zeros(8 * block, dtype=np.uint8)
    agent.copy(file, agent.register(found), source_spans=(block, there), target_spans=(block, range(8))).wait()
    assert (found == wanted[: 8 * block]).all()


def test_a_file_takes_its_name_when_it_is_committed(agent, tmp_path):
    path = tmp_path / "named"
    path.write_bytes(b"before")
    file = agent.open_file(path, LENGTH, replace=True)
    source = agent.register(pattern())
    agent.copy(source, file).wait()
    assert path.read_bytes() == b"before"
    agent.copy(source, file, commit=True).wait()
    assert path.stat().st_size == LENGTH
    assert [entry.name for entry in tmp_path.iterdir()] == ["named"]


def test_what_is_wrong_with_a_file_is_told(agent, tmp_path):
    with pytest.raises(weft.OsFailure) as told:
        agent.open_file(tmp_path / "absent", write=False)
    assert told.value.errno == 2
    (tmp_path / "empty").touch()
    with pytest.raises(weft.InvalidCall, match="is empty"):
        agent.open_file(tmp_path / "empty")
    with pytest.raises(weft.InvalidCall, match="only regular files"):
        agent.open_file(tmp_path)
    (tmp_path / "there").write_bytes(bytes(4096))
    kept = agent.open_file(tmp_path / "there", write=False)
    memory = agent.allocate(4096)
    agent.copy(kept, memory).wait()
    with pytest.raises(weft.InvalidCall, match="read-only"):
        agent.copy(memory, kept)
    with pytest.raises(BufferError, match="copy from it"):
        memoryview(kept)


def test_a_file_that_becomes_shorter_is_an_error_and_no_end(agent, tmp_path):
    file = agent.open_file(tmp_path / "short", LENGTH)
    memory = agent.allocate(LENGTH)
    agent.copy(memory, file).wait()
    (tmp_path / "short").write_bytes(bytes(4096))
    with pytest.raises(weft.TransferError):
        agent.copy(file, memory).wait()
