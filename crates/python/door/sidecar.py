"""What llm-d's routing sidecar says to the engines on both sides of it (`--kv-connector=nixlv2`), as a program of the same protocol in its place: a router in front of the decode engine's pod
names a prefill engine by a header, and every request goes two steps.

Written after the sidecar of llm-d-router 0.9 and 0.10, whose steps these are: the prefill engine is asked for one token with `do_remote_decode`, and what it answers as `kv_transfer_params`
goes to the decode engine as it is, beside the client's own request. Without the header the decode engine is asked alone.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The header by which whoever schedules names a prefill engine.
PREFILLER = "x-prefiller-host-port"
# What a prefill engine is asked with. The fields of NIXL's are there and empty.
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
LIMITS = {"/v1/chat/completions": ("max_tokens", "max_completion_tokens", "min_tokens"), "/v1/completions": ("max_tokens", "min_tokens")}
STEP_MAX = 300.0


class Sidecar:
    """Listens on this host, in front of one decode engine."""

    def __init__(self, decode: str) -> None:
        self.decode = decode
        # What happens between the two steps: of tests.
        self.between: Callable[[], None] = lambda: None
        sidecar = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                sidecar._forward(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _forward(self, client: BaseHTTPRequestHandler, body: bytes) -> None:
        prefill = (client.headers.get(PREFILLER) or "").split(",")[0].strip()
        headers = {"Content-Type": "application/json", "x-request-id": str(uuid.uuid4())}
        if prefill and client.path in LIMITS:
            asked = json.loads(body)
            first = asked | {"kv_transfer_params": dict(ASKED), "stream": False} | dict.fromkeys(LIMITS[client.path], 1)
            first.pop("stream_options", None)
            status, answer = _post(f"http://{prefill}{client.path}", json.dumps(first).encode(), headers)
            if status >= 300:
                # The client is told what the prefill engine said; nobody computes the prompt elsewhere.
                return _answer(client, status, answer)
            asked["kv_transfer_params"] = json.loads(answer).get("kv_transfer_params")
            body = json.dumps(asked).encode()
            self.between()
        _answer(client, *_post(self.decode + client.path, body, headers))


def _post(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=STEP_MAX) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return 502, json.dumps({"error": {"message": str(error)}}).encode()


def _answer(client: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    client.send_response(status)
    client.send_header("Content-Type", "application/json")
    client.send_header("Content-Length", str(len(body)))
    client.end_headers()
    client.wfile.write(body)
