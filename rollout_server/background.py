"""Calls that may block on a file system, away from the event loop, each with a deadline.

Invariant: at most one such call runs. A file system that hangs thus costs one thread, not one a look, and
never one of the event loop's own pool, which vLLM uses; and as a daemon, that thread does not keep the
process from ending. Called by the watcher and the appliers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from ..shared.errors import SlowStorageError

SLOWEST_BYTES_PER_S = 20_000_000
T = TypeVar("T")


class Background:
    """One thread; `deadline_s` bounds a call that moves no bytes."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future]] = SimpleQueue()
        threading.Thread(target=self._work, name="weightferry-files", daemon=True).start()

    async def run(self, what: str, act: Callable[[], T], *, num_bytes: int = 0) -> T:
        """The result of `act`, or its error; SlowStorageError when the deadline for so many bytes passes."""
        deadline_s = self._deadline_s + num_bytes / SLOWEST_BYTES_PER_S
        future: Future[T] = Future()
        self._calls.put((act, future))
        call = asyncio.wrap_future(future)
        # not wait_for: a TimeoutError of the file system itself must stay what it is
        done, _ = await asyncio.wait({call}, timeout=deadline_s)
        if not done:
            future.cancel()  # one that has not begun never will
            raise SlowStorageError(f"{what} did not end within {deadline_s:.0f} s")
        return call.result()

    def later(self, act: Callable[[], object]) -> None:
        """Have it done before any call that comes after; nobody waits for it, and its error is its own."""
        self._calls.put((act, Future()))

    def _work(self) -> None:
        while True:
            act, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)
