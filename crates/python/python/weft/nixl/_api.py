"""NIXL's Python API: its agent, by its names and signatures. What the calls are for is told in NIXL's own documentation; here, what they do otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any

from . import _bindings
from ._bindings import DEFAULT_COMM_PORT, nixl_status_t, nixlMismatchError
from ._lists import from_bytes, is_array, nixlRegDList, nixlRemoteDList, nixlXferDList
from .logging import get_logger

logger = get_logger(__name__)

nixl_backend_handle = int
# What programs import from here under this name.
nixlBind = _bindings

_MEMORIES = {
    "DRAM": _bindings.nixl_mem_t.DRAM_SEG,
    "VRAM": _bindings.nixl_mem_t.VRAM_SEG,
    "FILE": _bindings.nixl_mem_t.FILE_SEG,
    "BLOCK": _bindings.nixl_mem_t.BLK_SEG,
    "OBJ": _bindings.nixl_mem_t.OBJ_SEG,
    "cpu": _bindings.nixl_mem_t.DRAM_SEG,
    "cuda": _bindings.nixl_mem_t.VRAM_SEG,
}
_OPS = {"WRITE": _bindings.nixl_xfer_op_t.NIXL_WRITE, "READ": _bindings.nixl_xfer_op_t.NIXL_READ}


class nixl_thread_sync_t(Enum):
    NIXL_THREAD_SYNC_NONE = _bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = _bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = _bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = _bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT


class _Handle:
    """Something of an agent's that is released: by `release`, or with the last reference."""

    __slots__ = ("_agent", "_handle", "_released")
    _release = ""

    def __init__(self, agent: Any, value: Any) -> None:
        self._agent = agent
        self._handle = value
        self._released = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({id(self._handle):#x}, released={self._released})"

    def release(self) -> None:
        if not self._released:
            getattr(self._agent, self._release)(self._handle)
            self._released = True

    def __del__(self) -> None:
        try:
            self.release()
        except Exception as error:
            logger.error("%r was let go of, and could not be released: %s", self, error)


class nixl_prepped_dlist_handle(_Handle):
    """Descriptors, looked up."""

    __slots__ = ()
    _release = "releasedDlistH"


class nixl_xfer_handle(_Handle):
    """A transfer. Releasing one that is under way calls it off: afterwards nobody touches its memory. With a peer that is frozen that may take until the
    deadline."""

    __slots__ = ()
    _release = "releaseXferReq"


class nixl_agent_config:
    """How an agent is to be. Threads, ports and modes are NIXL's; here they change nothing."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t (got {type(sync_mode).__name__!r})")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class nixl_agent:
    """An agent of NIXL's kind over one of Weft's."""

    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False) -> None:
        if nixl_conf and instantiate_all:
            logger.warning("instantiate_all is passed over: the configuration names the back ends")
            instantiate_all = False
        nixl_conf = nixl_conf or nixl_agent_config()
        config = _bindings.nixlAgentConfig()
        config.useProgThread = nixl_conf.enable_pthread
        config.useListenThread = nixl_conf.enable_listen
        config.listenPort = nixl_conf.port
        mode = nixl_conf.sync_mode or (
            nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if nixl_conf.enable_listen else nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        )
        config.syncMode = mode.value
        config.captureTelemetry = nixl_conf.capture_telemetry
        self.agent = _bindings.nixlAgent(agent_name, config)
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, int] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        self.nixl_mems = dict(_MEMORIES)
        self.nixl_ops = dict(_OPS)
        for backend in self.plugin_list if instantiate_all else nixl_conf.backends:
            if backend in self.plugin_list:
                self.create_backend(backend)
            else:
                logger.warning("there is no back end %s here; agents of weft.nixl have %s", backend, ", ".join(self.plugin_list))

    def _handles(self, backends: Sequence[str]) -> list[int]:
        return [self.backends[backend] for backend in backends]

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        return self.agent.getPluginParams(backend)[1] if self._is_plugin(backend) else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Weft's settings by their names, empty: an empty one is as if it were not there."""
        return self.agent.getPluginParams(backend)[0] if self._is_plugin(backend) else {}

    def _is_plugin(self, backend: str) -> bool:
        if backend not in self.plugin_list:
            logger.warning("there is no back end %s here", backend)
        return backend in self.plugin_list

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return self.backend_mems[backend] if self._is_backend(backend) else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return self.backend_options[backend] if self._is_backend(backend) else {}

    def _is_backend(self, backend: str) -> bool:
        if backend not in self.backends:
            logger.warning("the back end %s has not been created", backend)
        return backend in self.backends

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """Weft, under whichever name it is asked for by. Parameters are Weft's settings; `deadline` and `checksum` are the ones that one wants."""
        self.backends[backend] = self.agent.createBackend(backend, initParams or {})
        parameters, memories = self.agent.getBackendParams(self.backends[backend])
        self.backend_options[backend] = parameters
        self.backend_mems[backend] = memories

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()) -> Any:
        descs = self.get_reg_descs(reg_list, mem_type)
        self.agent.registerMem(_list(descs), self._handles(backends))
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Afterwards nobody touches the memory, and whoever still knows it is refused. A peer that is frozen in the middle of it is an error."""
        self.agent.deregisterMem(_list(dereg_list), self._handles(backends))

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        if backend not in self.backends:
            raise ValueError(f"there is no back end {backend!r}, but {', '.join(self.backends)}")
        return self.agent.queryMem(_list(self.get_reg_descs(reg_list, mem_type)), self.backends[backend])

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        self.agent.makeConnection(remote_agent, self._handles(backends))

    def prep_xfer_dlist(
        self, agent_name: str | bytes, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixl_prepped_dlist_handle:
        """Every descriptor has to lie in one registration."""
        if agent_name in ("NIXL_INIT_AGENT", b"NIXL_INIT_AGENT"):
            agent_name = _bindings.NIXL_INIT_AGENT
        handles = self._handles(backends)
        if is_array(xfer_list) and len(xfer_list.shape) == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("rows at a stride need a mem_type")
            side = self.agent.prepXferDlist(agent_name, self.nixl_mems[mem_type], xfer_list, handles)
        else:
            side = self.agent.prepXferDlist(agent_name, self.get_xfer_descs(xfer_list, mem_type), handles)
        return nixl_prepped_dlist_handle(self.agent, side)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        duration, margin, method = self.agent.estimateXferCost(req_handle._handle)
        return duration, margin, str(method)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        op = self.nixl_ops[operation]
        here, there = local_xfer_side._handle, remote_xfer_side._handle
        request = self.agent.makeXferReq(op, here, local_indices, there, remote_indices, notif_msg, self._handles(backends))
        return nixl_xfer_handle(self.agent, request)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        op = self.nixl_ops[operation]
        request = self.agent.createXferReq(op, local_descs, remote_descs, remote_agent, notif_msg, self._handles(backends))
        return nixl_xfer_handle(self.agent, request)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """What fails is raised, and the text says what, with whom, and how far it came."""
        return _word(self.agent.postXferReq(handle._handle, notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Nobody has to call this for the transfer to go on, or for its notification to be sent."""
        return _word(self.agent.getXferStatus(handle._handle))

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> _bindings.nixlXferTelemetry:
        return self.agent.getXferTelemetry(handle._handle)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        return next(iter(self.backends))

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    def prep_mem_view(self, dlist: nixlXferDList | nixlRemoteDList, *, backends: Sequence[str] | None = None) -> int:
        return self.agent.prepMemView(dlist, self._handles(backends or ()))

    def release_mem_view(self, mvh: int) -> None:
        self.agent.releaseMemView(mvh)

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(
        self, remote_agent_name: str, lookup_tag: bytes, backends: Sequence[str] = (), tag_is_prefix: bool = True
    ) -> bool:
        messages = self.update_notifs(backends).get(remote_agent_name, [])
        for number, message in enumerate(messages):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del messages[number]
                return True
        return False

    def send_notif(self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None) -> None:
        self.agent.genNotif(remote_agent_name, notif_msg, self._handles([] if backend is None else [backend]))

    def get_agent_metadata(self) -> bytes:
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Bytes that another `weft.nixl` has not written raise `nixlMismatchError`. Of an agent that has started anew, what was known is forgotten."""
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str | bytes) -> None:
        self.agent.invalidateRemoteMD(agent)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        self.agent.sendLocalPartialMD(descs, inc_conn_info, self._handles(backends), ip_addr, port, label)

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        self.agent.invalidateLocalMD(ip_addr, port)

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        wanted = nixlXferDList(_bindings.nixl_mem_t.DRAM_SEG) if descs is None else descs
        return self.agent.checkRemoteMD(agent, wanted) == nixl_status_t.NIXL_SUCCESS

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        """`None` where it makes no list, as NIXL has it, and a line in the log."""
        return self._descs(nixlXferDList, descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList | None:
        return self._descs(nixlRemoteDList, descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        return self._descs(nixlRegDList, descs, mem_type)

    def _descs(self, kind: Any, descs: Any, mem_type: str | None) -> Any:
        if isinstance(descs, kind):
            return descs
        if isinstance(descs, (nixlXferDList, nixlRegDList, nixlRemoteDList)):
            return _none(f"a {type(descs).__name__} is no {kind.__name__}")
        tensors = [descs] if _is_tensor(descs) else descs
        fields = None
        if is_array(descs) and kind is not nixlRemoteDList:
            fields, wanted = descs.shape[-1] if len(descs.shape) == 2 else 0, 3
        elif isinstance(descs, list) and (not descs or isinstance(descs[0], tuple)):
            # Whether the others have as many is found when the list is made.
            fields, wanted = len(descs[0]) if descs else kind._FIELDS, kind._FIELDS
        if fields is not None:
            if mem_type is None:
                return _none("descriptors that are no tensors need a mem_type")
            memory = self.nixl_mems[mem_type]
            if fields != wanted:
                return _none(f"a {kind.__name__} needs {wanted} fields a descriptor here, not {fields}")
            return kind(memory, descs)
        if kind is nixlRemoteDList or not (isinstance(tensors, (list, tuple)) and tensors and all(map(_is_tensor, tensors))):
            return _none(f"nothing that a {kind.__name__} could be made of: {type(descs).__name__}")
        if any(tensor.device != tensors[0].device or not tensor.is_contiguous() for tensor in tensors):
            return _none("tensors have to be contiguous, and all on one device")
        # Of host memory, torch says -1.
        device = tensors[0].get_device()
        made = kind(_MEMORIES["DRAM" if device < 0 else "VRAM"])
        for tensor in tensors:
            row = (tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(device, 0))
            made.addDesc(row if kind is nixlXferDList else (*row, b""))
        return made

    def get_serialized_descs(self, descs: nixlXferDList | nixlRegDList | nixlRemoteDList) -> bytes:
        """Not by `pickle`, so that reading it runs nothing."""
        return descs.to_bytes()

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """What `get_serialized_descs` has not written raises `nixlMismatchError`."""
        return from_bytes(serialized_descs)


def _none(why: str) -> None:
    logger.error("%s", why)


def _list(descs: Any) -> Any:
    if descs is None:
        raise nixlMismatchError("NIXL_ERR_MISMATCH: this makes no list of descriptors; the log says why")
    return descs


def _word(status: nixl_status_t) -> str:
    return "DONE" if status == nixl_status_t.NIXL_SUCCESS else "PROC"


def _is_tensor(thing: object) -> bool:
    """Nothing is one before torch has been imported, which takes long."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)
