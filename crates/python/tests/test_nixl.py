"""The package as a back end of NIXL: its shared object is the plug-in, and its command tells how to use it. NIXL itself is behind `cargo xtask door-test nixl`."""

import ctypes
import importlib.util
import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest
import weft._weft

COMMAND = [str(pathlib.Path(sysconfig.get_path("scripts")) / "weft"), "nixl"]


def test_the_shared_object_is_a_plug_in():
    library = ctypes.CDLL(weft._weft.__file__)
    assert library.nixl_plugin_fini
    library.nixl_plugin_init.restype = ctypes.POINTER(ctypes.c_int)
    plugin = library.nixl_plugin_init()
    # What NIXL looks at first: the version of the interface.
    assert plugin and plugin[0] == 1


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="NIXL is here")
def test_the_command_says_that_there_is_no_nixl(tmp_path):
    told = subprocess.run(COMMAND, capture_output=True, text=True, timeout=60, env=os.environ | {"HOME": str(tmp_path)})
    assert told.returncode == 1 and told.stdout == ""
    # It asks the Python that it runs in.
    assert f"NIXL is not installed for {sys.executable}" in told.stderr and "pip install nixl" in told.stderr
