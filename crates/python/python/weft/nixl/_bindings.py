"""What NIXL's Python API has below it: the agent in NIXL's own terms, lists of descriptors, numbers, errors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .._weft import _NixlAgent, _NixlRequest, _NixlSide
from ._errors import (
    _NixlError,
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlNoTelemetryError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)
from ._lists import nixlRegDList, nixlRemoteDList, nixlXferDList, strided_rows
from ._numbers import nixl_cost_t, nixl_mem_t, nixl_status_t, nixl_thread_sync_t, nixl_xfer_op_t

__all__ = [
    "DEFAULT_COMM_PORT",
    "HAVE_UCX_GPU_DEVICE_API",
    "NIXL_INIT_AGENT",
    "nixlAgent",
    "nixlAgentConfig",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_cost_t",
    "nixl_mem_t",
    "nixl_status_t",
    "nixl_thread_sync_t",
    "nixl_xfer_op_t",
]

NIXL_INIT_AGENT = ""
DEFAULT_COMM_PORT = 8888
# Transfers that a device begins are not there.
HAVE_UCX_GPU_DEVICE_API = False

# Every number by its own name too, as NIXL has them.
for _numbers in (nixl_thread_sync_t, nixl_mem_t, nixl_xfer_op_t, nixl_cost_t, nixl_status_t):
    globals().update(_numbers.__members__)
    __all__ += _numbers.__members__

# What a back end may be asked for by. It is Weft under each of the names: programs that want UCX, and do not let one choose, get Weft too.
PLUGINS = ("WEFT", "UCX", "LIBFABRIC")


@dataclass
class nixlAgentConfig:
    """How an agent is to be. Weft's threads sleep by themselves and its calls may come from any thread, so most of it changes nothing."""

    useProgThread: bool = True
    useListenThread: bool = False
    listenPort: int = DEFAULT_COMM_PORT
    syncMode: nixl_thread_sync_t = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT
    pthrDelay: int = 0
    lthrDelay: int = 100000
    captureTelemetry: bool = False
    etcdWatchTimeout: int = 5000000


@dataclass(frozen=True)
class nixlXferTelemetry:
    """How a transfer went; times in microseconds."""

    startTime: int = 0
    postDuration: int = 0
    xferDuration: int = 0
    totalBytes: int = 0
    descCount: int = 0


class nixlAgent:
    """An agent. It has one back end, which may have several names."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        if not name:
            raise ValueError("an agent needs a name")
        self._name = name
        self._telemetry = _asked_for_telemetry(config)
        self._agent: _NixlAgent | None = None
        self._backends: list[str] = []
        self._parameters: dict[str, str] = {}

    @property
    def _live(self) -> _NixlAgent:
        if self._agent is None:
            raise nixlInvalidParamError("NIXL_ERR_INVALID_PARAM: the agent has no back end yet")
        return self._agent

    def getAvailPlugins(self) -> list[str]:
        return list(PLUGINS)

    def getPluginParams(self, type: str) -> tuple[dict[str, str], list[str]]:
        if type not in PLUGINS:
            raise nixlNotFoundError(f"NIXL_ERR_NOT_FOUND: there is no plug-in {type!r}, but {', '.join(PLUGINS)}")
        return dict.fromkeys(_NixlAgent.offered(), ""), _memories()

    def createBackend(self, type: str, initParams: dict[str, str]) -> int:
        self.getPluginParams(type)
        if type in self._backends:
            raise nixlInvalidParamError(f"NIXL_ERR_INVALID_PARAM: the agent has the back end {type} already")
        # What NIXL offers is handed back as it is, empty.
        parameters = {key: str(value) for key, value in initParams.items() if str(value).strip()}
        if self._agent is None:
            try:
                self._agent = _NixlAgent(self._name, type, list(parameters.items()))
            except _NixlError as error:
                raise nixlBackendError(f"NIXL_ERR_BACKEND: {str(error).partition(': ')[2]}") from error
            self._parameters = parameters
        elif parameters not in ({}, self._parameters):
            raise nixlInvalidParamError(
                f"NIXL_ERR_INVALID_PARAM: {type} is {self._backends[0]} by another name here, and has its parameters"
            )
        self._backends.append(type)
        return len(self._backends)

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        self._check([backend])
        return dict(self._parameters), _memories()

    def _check(self, backends: Iterable[int]) -> None:
        if not all(1 <= backend <= len(self._backends) for backend in backends):
            raise nixlInvalidParamError("NIXL_ERR_INVALID_PARAM: a back end that this agent does not have")

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        self._check(backends)
        self._live.register(_kind(descs), descs._rows)
        return nixl_status_t.NIXL_SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        self._check(backends)
        self._live.deregister(_kind(descs), descs._rows)
        return nixl_status_t.NIXL_SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        self._check([backend])
        raise _not_supported("a query of memory: it is for files and objects")

    def makeConnection(self, remote_agent: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        self._check(backends)
        self._live.connect(_text(remote_agent))
        return nixl_status_t.NIXL_SUCCESS

    def prepXferDlist(self, *arguments: Any) -> _NixlSide:
        """`(agent, list, back ends)`; the same without an agent, for this one; or `(agent, memory type, array of rows of five, back ends)`."""
        agent: str | bytes = NIXL_INIT_AGENT
        if arguments and isinstance(arguments[0], (str, bytes)):
            agent, *arguments = arguments  # type: ignore[assignment]
        name = _text(agent) or None
        if arguments and isinstance(arguments[0], nixl_mem_t):
            memory, rows, *backends = arguments
            self._check(*backends)
            return self._live.side(name, _kind_of(memory), strided_rows(rows), 5)
        descs, *backends = arguments
        self._check(*(backends or [()]))
        if not isinstance(descs, nixlXferDList):
            raise nixlInvalidParamError("NIXL_ERR_INVALID_PARAM: this is no list of descriptors")
        return self._live.side(name, _kind(descs), descs._rows)

    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: _NixlSide,
        local_indices: Any,
        remote_side: _NixlSide,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backend: Sequence[int] = (),
        skip_desc_merg: bool = False,
    ) -> _NixlRequest:
        self._check(backend)
        return self._live.ask(
            operation == nixl_xfer_op_t.NIXL_WRITE, local_side, local_indices, remote_side, remote_indices, _said(notif_msg)
        )

    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backend: Sequence[int] = (),
    ) -> _NixlRequest:
        here = self.prepXferDlist(NIXL_INIT_AGENT, local_descs, backend)
        there = self.prepXferDlist(_text(remote_agent), remote_descs, backend)
        return self._live.ask(operation == nixl_xfer_op_t.NIXL_WRITE, here, None, there, None, _said(notif_msg))

    def estimateXferCost(self, req_handle: _NixlRequest) -> tuple[int, int, int]:
        raise _not_supported("an estimate of a transfer")

    def postXferReq(self, reqh: _NixlRequest, notif_msg: bytes | str = b"") -> nixl_status_t:
        return _stage(self._live.post(reqh, _said(notif_msg)))

    def getXferStatus(self, reqh: _NixlRequest) -> nixl_status_t:
        return _stage(self._live.check(reqh))

    def getXferTelemetry(self, reqh: _NixlRequest) -> nixlXferTelemetry:
        told = reqh.telemetry() if self._telemetry else None
        if told is None:
            why = "the transfer has not ended" if self._telemetry else "it was not asked for"
            raise nixlNoTelemetryError(f"NIXL_ERR_NO_TELEMETRY: {why}")
        return nixlXferTelemetry(*told)

    def queryXferBackend(self, reqh: _NixlRequest) -> int:
        return 1

    def releaseXferReq(self, reqh: _NixlRequest) -> nixl_status_t:
        reqh.end()
        return nixl_status_t.NIXL_SUCCESS

    def releasedDlistH(self, handle: _NixlSide) -> nixl_status_t:
        return nixl_status_t.NIXL_SUCCESS

    def getNotifs(self, notif_map: dict[str, list[bytes]], backends: Sequence[int] = ()) -> dict[str, list[bytes]]:
        self._check(backends)
        for agent, message in self._live.notifications():
            notif_map.setdefault(agent, []).append(message)
        return notif_map

    def genNotif(self, remote_agent: str | bytes, msg: bytes | str, backends: int | Sequence[int] = ()) -> nixl_status_t:
        self._check([backends] if isinstance(backends, int) else backends)
        self._live.notify(_text(remote_agent), _said(msg) or b"")
        return nixl_status_t.NIXL_SUCCESS

    def getLocalMD(self) -> bytes:
        return self._live.introduction()

    def getLocalPartialMD(self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()) -> bytes:
        self._check(backends)
        return self._live.introduction((_kind(descs), descs._rows), inc_conn_info)

    def loadRemoteMD(self, remote_metadata: bytes) -> bytes:
        return self._live.meet(remote_metadata).encode()

    def invalidateRemoteMD(self, remote_agent: str | bytes) -> nixl_status_t:
        try:
            self._live.forget(_text(remote_agent))
        except nixlNotFoundError:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        return nixl_status_t.NIXL_SUCCESS

    def checkRemoteMD(self, remote_name: str | bytes, descs: nixlXferDList) -> nixl_status_t:
        known = self._agent is not None and self._agent.knows(_text(remote_name), _kind(descs), descs._rows)
        return nixl_status_t.NIXL_SUCCESS if known else nixl_status_t.NIXL_ERR_NOT_FOUND

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        raise _carried_by_hand()

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        raise _carried_by_hand()

    def fetchRemoteMD(self, remote_agent: str | bytes, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        raise _carried_by_hand()

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        raise _carried_by_hand()

    def prepMemView(self, dlist: nixlXferDList | nixlRemoteDList, backends: Sequence[int] = ()) -> int:
        raise _not_supported("a transfer that a device begins")

    def releaseMemView(self, mvh: int) -> None:
        raise _not_supported("a transfer that a device begins")


def _memories() -> list[str]:
    return ["DRAM_SEG", "VRAM_SEG"] if _NixlAgent.has_devices() else ["DRAM_SEG"]


def _kind(descs: nixlXferDList | nixlRegDList) -> int:
    return _kind_of(descs.getType())


def _kind_of(memory: nixl_mem_t) -> int:
    if memory not in (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG):
        raise _not_supported(f"memory of the kind {memory.name}")
    return int(memory)


def _stage(ended: bool) -> nixl_status_t:
    return nixl_status_t.NIXL_SUCCESS if ended else nixl_status_t.NIXL_IN_PROG


def _said(message: bytes | str) -> bytes | None:
    """A notification; an empty one is none."""
    return (message.encode() if isinstance(message, str) else bytes(message)) or None


def _text(name: str | bytes) -> str:
    """An agent's name, which NIXL gives out as bytes and takes as either."""
    return name.decode() if isinstance(name, bytes) else name


def _asked_for_telemetry(config: nixlAgentConfig) -> bool:
    """NIXL's variable is above what the program says."""
    said = os.environ.get("NIXL_TELEMETRY_ENABLE", "").strip().lower()
    return said in ("y", "yes", "on", "1", "true", "enable") if said else config.captureTelemetry


def _not_supported(what: str) -> nixlNotSupportedError:
    return nixlNotSupportedError(f"NIXL_ERR_NOT_SUPPORTED: {what} is not supported by weft.nixl")


def _carried_by_hand() -> nixlNotSupportedError:
    return _not_supported("metadata by etcd or by a listening thread; get_agent_metadata and add_remote_agent are, and that")
