"""`latest.json`: the number of the newest version, replaced after each commit. A hint; the log is the truth.

Invariant: whoever writes it looks at the log once more afterwards, so that a process that slept between its
look and its write cannot leave an old number behind. Called by a publication after its commit, by the next
writer, and by `weightferry verify --repair`. Follows docs/format.md [5] 6.
"""

from __future__ import annotations

from .digest import canonical_json
from .errors import ExchangeError, IntegrityError
from .exchange import LATEST_NAME, Exchange
from .manifest import FORMAT


def point_at_newest(exchange: Exchange) -> int:
    """Write the newest version's number, and again as long as a newer one appears meanwhile."""
    written = None
    while written != (newest := newest_in_log(exchange)):
        exchange.store.replace(LATEST_NAME, canonical_json({"format": FORMAT, "number": newest}))
        written = newest
    return newest


def mend_pointer(exchange: Exchange) -> bool:
    """A writer that dies right after its commit leaves the pointer behind; True if it was mended."""
    try:
        if exchange.newest_number() == newest_in_log(exchange):
            return False
    except ExchangeError:
        pass  # it cannot be read: that is mended too
    point_at_newest(exchange)
    return True


def require_log_reaches_pointer(exchange: Exchange) -> None:
    """Raise IntegrityError if `latest.json` names a slot that the log has not got.

    A version is committed before it is pointed at, so entries were lost; who appended now would use numbers
    again, and sweep versions that the lost entries named.
    """
    try:
        pointer = exchange.newest_number()
    except ExchangeError:
        return  # it cannot be read, and so says nothing
    exchange.log.absorb()
    if pointer > (last := len(exchange.log.entries)):
        raise IntegrityError(
            exchange.store.where(LATEST_NAME),
            "names a version beyond the last entry of the log",
            expected=f"{last} at most",
            found=pointer,
            action="restore log/ from a copy, or start a new exchange; only if you know that nothing is "
            f"missing in log/, delete {LATEST_NAME}: the next writer makes it anew",
        )


def newest_in_log(exchange: Exchange) -> int:
    exchange.log.absorb()
    versions = exchange.log.versions
    return versions[-1].number if versions else 0
