"""What can be mended in an exchange without touching a good version: the pointer, and garbage.

Safe beside a live writer and live readers: only what no log entry names, or what retention has passed and
nobody leases, is removed. Called by `weightferry verify --repair`. Follows docs/format.md [5] and [7].
"""

from __future__ import annotations

import time

from .exchange import LATEST_NAME, Exchange
from .pointer import mend_pointer, require_log_reaches_pointer
from .retention import GRACE_S, Pruner, RetentionPolicy
from .writer import sweep_unfinished

_POLL_S = 0.2


def repair(exchange: Exchange, *, grace_s: float = GRACE_S) -> list[str]:
    """Mend, and say in a line each what was done. Waits at most the grace, if something has to go."""
    exchange.log.require_dense()
    require_log_reaches_pointer(exchange)
    done = []
    if mend_pointer(exchange):
        done.append(f"{exchange.store.where(LATEST_NAME)} names {exchange.newest_number()} again")
    for name in sweep_unfinished(exchange):
        done.append(f"{name}, left by a dead writer, was removed")
    pruner = Pruner(exchange, RetentionPolicy(), grace_s=grace_s)
    deadline = time.monotonic() + grace_s + _POLL_S
    while True:
        report = pruner.advance()
        done += [f"version {number}, which retention has passed, was removed" for number in report.removed]
        if not report.held or time.monotonic() > deadline:
            return done
        time.sleep(_POLL_S)
