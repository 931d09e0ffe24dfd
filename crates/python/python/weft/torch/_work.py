"""Calls under way, as torch sees them."""

import atexit
import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import weft

# How long whoever leaves waits for a thread that may have something to wait for itself.
FAREWELL = 1.0


class Work(c10d.Work):
    """A call under way."""

    def __init__(self, pending, results: list[Tensor], after: Callable[[], None] | None, completions: "Completions"):
        super().__init__()
        self._pending = pending
        self._results = results
        self._after = after
        self._completions = completions
        self._future: torch.futures.Future | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._pending is not None:
            try:
                self._pending.wait(timeout.total_seconds() if timeout else None)
            except weft.TimedOut as error:
                raise dist.DistBackendError(str(error)) from error
        self._finish()
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        if self._pending is not None and not self._pending.done:
            return False
        self._finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future:
        self._completions.check_process()
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
        if self.is_completed():
            self._settle(future)
        else:
            self._completions.put(self, future)
        return future

    def _settle(self, future: torch.futures.Future) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)

    def _finish(self) -> None:
        """Does what follows the call, once. It has ended."""
        self._completions.check_process()
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None:
                return
            try:
                pending.poll()
                if self._after is not None:
                    self._after()
            except Exception as error:
                self._error = error
            self._after = None


class Completions:
    """Futures that nobody may be waiting for: a thread does."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def check_process(self) -> None:
        """A forked child has no thread that would settle anything, and perhaps a lock that nobody gives back."""
        if os.getpid() != self._process:
            raise weft.Forked("this call was made before a fork, and belongs to the process that made it")

    def put(self, work: Work, future: torch.futures.Future) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-torch", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._queue.put((work, future))

    def close(self) -> None:
        """Ends the thread. One that is still there when the interpreter ends is ended in the middle of whatever it does, and the process with it."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._process:
            return
        self._queue.put(None)
        if thread is not threading.current_thread():
            thread.join(FAREWELL)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, future = entry
            try:
                work.wait()
            except Exception:
                pass  # It is the work's to tell.
            work._settle(future)
