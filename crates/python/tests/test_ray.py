"""`weft.ray` beside the shape of Ray's interface, without Ray. With Ray and its actors: `cargo xtask door-test ray`."""

import os
import subprocess
import sys

METHODS = ["_make_nixl_agent", "select_backend", "actor_has_tensor_transport", "tensor_transport_backend"]


def shape_of_ray(directory, methods):
    """As much of Ray as `weft.ray` imports, in the places where Ray 2.60 has it."""
    below = directory / "ray" / "experimental" / "rdt"
    below.mkdir(parents=True)
    (directory / "ray" / "__init__.py").write_text("__version__ = '9.9'\n")
    (directory / "ray" / "experimental" / "__init__.py").write_text("def register_tensor_transport(*arguments): pass\n")
    (below / "__init__.py").write_text("")
    body = "".join(f"    def {name}(self, *arguments): pass\n" for name in methods) or "    pass\n"
    (below / "nixl_tensor_transport.py").write_text(f"class NixlTensorTransport:\n{body}")


def run(directory, program):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)


def test_another_interface_is_refused(tmp_path):
    for missing in METHODS:
        directory = tmp_path / missing
        shape_of_ray(directory, [name for name in METHODS if name != missing])
        ran = run(directory, "import weft.ray")
        assert ran.returncode == 1 and f"it has no {missing}" in ran.stderr and "Ray 9.9" in ran.stderr, ran.stderr


AGENTS = """
import ctypes, time, weft.ray
from weft.nixl import nixl_agent_config
source, sink = (weft.ray._Agent(name, nixl_agent_config(backends=["WEFT"])) for name in ("source", "sink"))
assert weft.ray.WeftTensorTransport().select_backend() == weft.ray.WeftTensorTransport().tensor_transport_backend() == "WEFT"
mine, theirs = ctypes.create_string_buffer(64), ctypes.create_string_buffer(b"x" * 63, 64)
row = lambda buffer: (ctypes.addressof(buffer), 64, 0)
sink.register_memory([(*row(mine), "")], "DRAM")
registered = source.register_memory([(*row(theirs), "")], "DRAM")
for number in range(2):
    sink.add_remote_agent(source.get_agent_metadata())
    handle = sink.initialize_xfer("READ", sink.get_xfer_descs([row(mine)], "cpu"), sink.get_xfer_descs([row(theirs)], "cpu"), "source", b"UUID")
    state = sink.transfer(handle)
    while state == "PROC":
        time.sleep(0.001)
        state = sink.check_xfer_state(handle)
    assert mine.raw == theirs.raw
    # As Ray does when memory was given back: removed, and added again with what there is now.
    source.deregister_memory(registered)
    registered = source.register_memory([(*row(theirs), "")], "DRAM")
    sink.remove_remote_agent("source")
    assert sink.check_remote_metadata("source")
# Nobody takes what is told, so nothing is.
time.sleep(0.2)
assert source.get_new_notifs() == {}, source.get_new_notifs()
# One that was removed and does not come back is forgotten.
other = weft.ray._Agent("other", nixl_agent_config(backends=["WEFT"]))
sink.add_remote_agent(other.get_agent_metadata())
assert sink.check_remote_metadata("other") and not sink.check_remote_metadata("source")
print("ok")
"""


def test_its_agents_keep_sessions_and_tell_nothing(tmp_path):
    shape_of_ray(tmp_path, METHODS)
    ran = run(tmp_path, AGENTS)
    assert ran.stdout.strip() == "ok", ran.stderr
