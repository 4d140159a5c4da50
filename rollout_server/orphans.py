"""vLLM's child processes end with their parent, also when it was killed.

Without this a SIGKILL of the API server leaves its engine running for good, with the accelerator's memory,
and the server that comes in its place does not fit (vLLM 0.32). Called in every vLLM process by
engine.prepare_process. Can go when vLLM's engine watches its API server itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

LOOK_S = 1.0


def end_with_parent() -> None:
    """Watch the parent from a thread, in a process that multiprocessing started; else do nothing."""
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_watch, args=(os.getppid(),), name="weightferry-parent", daemon=True).start()


def _watch(parent: int) -> None:
    # an orphan is given another parent; a pipe's end would be held open by brothers and sisters
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
