"""A request to stop, made with SIGTERM or SIGINT: noted, and obeyed between two steps.

A second request ends the process at once. One request may arrive twice within a moment: torchrun passes on
what it gets, while Slurm or a terminal may signal the ranks as well. Those count as one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_S = 1.0


class StopRequest:
    """Listens while it is entered; outside, the signals do what they did before."""

    def __init__(self) -> None:
        self.is_requested = False
        self._requested_at = 0.0

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.is_requested:
            self.is_requested, self._requested_at = True, time.monotonic()
        elif time.monotonic() - self._requested_at > SAME_REQUEST_S:
            print(f"weightferry trainer: a second {signal.Signals(number).name}: ending now", file=sys.stderr)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
