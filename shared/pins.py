"""Pins: versions that people keep, whatever retention says. A pin is an entry of the log.

So pinning and giving up are in one order that every process sees: a version is either pinned first and then
always kept, or passed first and then the pin is refused. Called by `weightferry pin | unpin` and by
retention. Follows docs/format.md [7].
"""

from __future__ import annotations

from typing import Any

from .exchange import Exchange
from .process import owner_name


def pin(exchange: Exchange, number: int) -> bool:
    """Keep a version for good; False if it was pinned already. VersionNotFoundError if it is passed."""

    def decide(_slot: int) -> dict[str, Any] | None:
        exchange.require_retained(number)
        return None if number in exchange.log.pinned else {"target": number}

    return _append(exchange, "pin", decide)


def unpin(exchange: Exchange, number: int) -> bool:
    """Leave a version to retention again; False if it was not pinned."""

    def decide(_slot: int) -> dict[str, Any] | None:
        return {"target": number} if number in exchange.log.pinned else None

    return _append(exchange, "unpin", decide)


def _append(exchange: Exchange, kind: str, decide: Any) -> bool:
    run_id = exchange.log.reigning_run
    return exchange.log.append_if(decide, kind=kind, run_id=run_id, owner=owner_name()) is not None
