"""A plugin of pytest's: NIXL's own tests run with Weft's module in NIXL's place, as `pytest -p in_place` with this directory on PYTHONPATH."""

import weft.nixl

weft.nixl.install()
