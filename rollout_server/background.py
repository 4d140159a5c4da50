"""Calls that may block on a file system, away from the event loop, each with a deadline.

Invariant: at most one such call runs. A file system that hangs thus costs one thread, not one a look, and
never one of the event loop's own pool, which vLLM uses. Called by the watcher and the appliers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..shared.errors import ApplyError

SLOWEST_BYTES_PER_S = 20_000_000
T = TypeVar("T")


class Background:
    """One thread; `deadline_s` bounds a call that moves no bytes."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightferry")

    async def run(self, what: str, act: Callable[[], T], *, num_bytes: int = 0) -> T:
        """The result of `act`, or its error, or ApplyError when the deadline for so many bytes passes."""
        deadline_s = self._deadline_s + num_bytes / SLOWEST_BYTES_PER_S
        call = asyncio.wrap_future(self._thread.submit(act))
        # not wait_for: a TimeoutError of the file system itself must stay what it is
        done, _ = await asyncio.wait({call}, timeout=deadline_s)
        if not done:
            call.cancel()
            raise ApplyError(f"{what} did not end within {deadline_s:.0f} s")
        return call.result()
