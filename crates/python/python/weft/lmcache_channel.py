"""LMCache's transfer channel, by which its servers read each other's blocks (P2P), over Weft by Weft's own name:

    python -m weft.lmcache_channel server … --p2p-advertise-url 10.0.0.5:7600 --p2p-transfer-engine weft

is `lmcache server …` that knows the name. What LMCache asks of a channel, its own for NIXL does; this is that one with agents of `weft.nixl`, so NIXL is not needed. Both ends must have it.

Otherwise than there, a peer that dies or stands still is a read that has failed, and thereby a miss, and no exception in LMCache's loop; and no read outlives LMCache's patience: what it
has given up is not written to any more.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from lmcache.v1.distributed.transfer_channel.api import TransferChannelAddress, TransferChannelReadResult
from lmcache.v1.distributed.transfer_channel.factory import register_transfer_channel_factory
from lmcache.v1.distributed.transfer_channel.impl.nixl_impl import NixlTransferChannelClient, NixlTransferChannelContext

from . import nixl
from .nixl._errors import _NixlError

__all__ = ["NAME", "WeftTransferChannelClient", "WeftTransferChannelContext", "main", "register"]

NAME = "weft"
# LMCache gives a load up after 30 s (`--p2p-load-timeout`) and uses its memory for something else. A read has ended before, unless WEFT_DEADLINE says otherwise.
_DEADLINE = "20s"

logger = logging.getLogger(__name__)


class WeftTransferChannelClient(NixlTransferChannelClient):
    """Reads from one peer."""

    def __init__(self, context: WeftTransferChannelContext, remote_agent_name: str, remote_dlist_handle: Any) -> None:
        super().__init__(context, remote_agent_name, remote_dlist_handle)
        # Reads that could not even be begun, with how many objects each had.
        self._refused: dict[int, int] = {}

    def submit_read(self, local_addresses: list[TransferChannelAddress], remote_addresses: list[TransferChannelAddress]) -> int:
        try:
            return int(super().submit_read(local_addresses, remote_addresses))
        except _NixlError as error:
            logger.warning("a read of %d objects from %s could not be begun: %s", len(remote_addresses), self._remote_agent_name, error)
        with self._lock:
            task_id = self._task_counter
            self._task_counter += 1
            self._refused[task_id] = len(remote_addresses)
        return task_id

    def query_read_status(self, task_id: int) -> TransferChannelReadResult:
        with self._lock:
            refused = self._refused.pop(task_id, None)
        if refused is not None:
            return TransferChannelReadResult(finished=True, succeeded_mask=[False] * refused)
        try:
            return super().query_read_status(task_id)
        except _NixlError as error:
            # It has ended, and with it whatever touched the memory.
            with self._lock:
                handle, remote_addresses = self._tasks.pop(task_id)
            logger.warning("a read of %d objects from %s has failed: %s", len(remote_addresses), self._remote_agent_name, error)
            handle.release()
            return TransferChannelReadResult(finished=True, succeeded_mask=[False] * len(remote_addresses))


class WeftTransferChannelContext(NixlTransferChannelContext):
    """One agent, with the memory of one server."""

    def register_client(self, key: str, client: NixlTransferChannelClient) -> NixlTransferChannelClient:
        # Made by whoever connected, or was connected to.
        if not isinstance(client, WeftTransferChannelClient):
            client = WeftTransferChannelClient(self, client._remote_agent_name, client._remote_handle)
        return super().register_client(key, client)


def _made(l1_memory_desc: Any, listen_url: str, advertise_url: str, **_: Any) -> WeftTransferChannelContext:
    os.environ.setdefault("WEFT_DEADLINE", _DEADLINE)
    nixl.install()
    return WeftTransferChannelContext(l1_memory_desc, listen_url, advertise_url, backends=["WEFT"])


def register() -> None:
    """Makes the name known to LMCache, in this process; a second call does nothing."""
    from lmcache.v1.distributed.transfer_channel import factory

    if NAME not in factory._TRANSFER_CHANNEL_FACTORY_REGISTRY:
        register_transfer_channel_factory(NAME, _made)


def main() -> None:
    """LMCache's command, with the name."""
    from lmcache.cli.main import main as lmcache

    register()
    lmcache(sys.argv[1:])


if __name__ == "__main__":
    main()
