"""A wire that can be made bad: relays TCP, and flips a bit in what comes from the far end when told to."""

from __future__ import annotations

import socket
import threading


class Relay:
    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        # How many more chunks of at least this many bytes are damaged.
        self.damage = 0
        self.damaged = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._to)
            for here, there, flips in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=(here, there, flips), daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket, flips: bool) -> None:
        try:
            while chunk := here.recv(1 << 16):
                if flips and len(chunk) >= 16384:
                    with self._lock:
                        if self.damage > 0:
                            self.damage -= 1
                            self.damaged += 1
                            bad = bytearray(chunk)
                            bad[len(bad) // 2] ^= 0x10
                            chunk = bytes(bad)
                there.sendall(chunk)
        except OSError:
            pass
        finally:
            for end in (here, there):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
