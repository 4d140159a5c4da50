"""What must hold of an exchange whatever happened to it before: for crash, chaos and interleaving tests."""

from __future__ import annotations

from collections.abc import Iterable

from weightferry.shared.commit_log import CommitLog
from weightferry.shared.exchange import Exchange
from weightferry.shared.verify import verify_version


def audit(url: str, committed: Iterable[int]) -> list[str]:
    """Every rule that is broken, in words; `committed` are the numbers whose commit was acknowledged."""
    exchange = Exchange.open(url)
    log = exchange.log
    log.absorb()
    broken = [
        f"slot {entry.number} is not dense" for i, entry in enumerate(log.entries, 1) if entry.number != i
    ]
    if len(exchange.store.list("log")) != len(log.entries):
        broken.append("the log has a gap")
    broken += _epochs(log)
    known = {entry.number for entry in log.versions}
    broken += [f"committed version {number} is lost" for number in committed if number not in known]
    for version in exchange.versions():
        broken += [f"TORN {finding}" for finding in verify_version(version)]
    return broken


def audit_clean(url: str, committed: Iterable[int]) -> list[str]:
    """As `audit`, after a recovery: the pointer is right, and no garbage is left."""
    broken = audit(url, committed)
    exchange = Exchange.open(url)
    newest = exchange.latest()
    if exchange.newest_number() != (newest.number if newest else 0):
        broken.append(f"the pointer says {exchange.newest_number()}, the log {newest}")
    named = {version.dir.rpartition("/")[2] for version in exchange.versions()}
    there = set(exchange.store.list_started("versions"))
    if there != named:
        broken.append(f"directories {there ^ named} are garbage or missing")
    if exchange.store.path is not None:
        broken += [f"{path} was left" for path in exchange.store.path.rglob(".tmp-*")]
    return broken


def _epochs(log: CommitLog) -> list[str]:
    broken, epoch = [], 0
    for entry in log.entries:
        epoch += entry.kind == "epoch"
        if entry.epoch != epoch:
            broken.append(f"slot {entry.number} has epoch {entry.epoch} in the reign of {epoch}")
    return broken
