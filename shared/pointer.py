"""`latest.json`: the number of the newest version, replaced after each commit. A hint; the log is the truth.

Invariant: whoever writes it looks at the log once more afterwards, so that a process that slept between its
look and its write cannot leave an old number behind. Called by a publication after its commit, by the next
writer, and by `weightferry verify --repair`. Follows docs/format.md [5] 6.
"""

from __future__ import annotations

from .digest import canonical_json
from .errors import ExchangeError
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


def newest_in_log(exchange: Exchange) -> int:
    exchange.log.absorb()
    versions = exchange.log.versions
    return versions[-1].number if versions else 0
