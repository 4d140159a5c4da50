"""Becoming the one writer of an exchange, and beginning publications.

Invariant: from its epoch entry on, no older writer can commit. `writer.json` only tells people and later
writers who is at work; safety never depends on it. Follows docs/format.md [5] 1 and 2.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from . import durable
from .beat import Beat
from .commit_log import LOG_NAME
from .digest import canonical_json
from .errors import WriterActiveError
from .exchange import LATEST_NAME, VERSIONS_NAME, Exchange
from .manifest import FORMAT, check_format, read_json_object
from .publication import Publication

WRITER_NAME = "writer.json"
WRITER_TTL_S = 30.0
_POLL_S = 0.2
_DIRECTORY = re.compile(r"step\d{8,}-e(\d{4,})-[0-9a-f]+\Z")


class ExchangeWriter:
    """The writer of one epoch. Make it with `become`; close it when the job ends.

    `sweep_report` lists the unfinished version directories of dead writers that `become` removed.
    """

    def __init__(self, exchange: Exchange, *, run_id: str, epoch: int, ttl_s: float) -> None:
        self.exchange, self.run_id, self.epoch = exchange, run_id, epoch
        self.owner = owner_name()
        self._ttl_s, self._closed = ttl_s, False
        self.sweep_report = _sweep(exchange, epoch)
        _mend_latest(exchange)
        self._beat = Beat(exchange.path / WRITER_NAME, self._content, ttl_s)
        self.base_shards: dict[str, Any] = {}

    @classmethod
    def become(cls, exchange: Exchange, *, run_id: str, writer_ttl_s: float = WRITER_TTL_S) -> ExchangeWriter:
        """Take the exchange over, unless another writer lives: then WriterActiveError names it.

        A writer lives if its beat moves within its ttl (seconds) by this process's own clock. One that
        closed cleanly, or whose process is gone from this same host, is not waited for.
        """
        _wait_until_writer_is_dead(exchange.path / WRITER_NAME)
        entry = exchange.log.append(kind="epoch", epoch=None, run_id=run_id, owner=owner_name())
        return cls(exchange, run_id=run_id, epoch=entry.epoch, ttl_s=writer_ttl_s)

    def begin(self, step: int) -> Publication:
        """Start a version for training step `step`; nothing of it is visible before `commit`."""
        name = f"{VERSIONS_NAME}/step{step:08d}-e{self.epoch:04d}-{uuid.uuid4().hex[:6]}"
        return Publication(self, relative_dir=name, step=step)

    def close(self) -> None:
        """Stop beating and say that the next writer need not wait."""
        if not self._closed:
            self._closed = True
            self._beat.close()
            durable.replace(self.exchange.path / WRITER_NAME, canonical_json(self._content(-1)))

    def _content(self, beat: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "epoch": self.epoch,
            "owner": self.owner,
            "process": _process_identity(),
            "ttl_s": self._ttl_s,
            "beat": beat,
            "closed": self._closed,
        }


def owner_name() -> str:
    """This process as people look for it: host and pid."""
    return f"{socket.gethostname()} pid {os.getpid()}"


def _process_identity() -> dict[str, Any]:
    """What tells this process from every other one of this host, across reboots and reused pids."""
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
    }


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _start_time(pid: int) -> str:
    """Clock ticks after boot at which a process started, "" if there is none; proc(5), field 22."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    is_gone = fields[0] in ("Z", "X")
    return "" if is_gone else fields[19]


def _is_gone_from_this_host(process: dict[str, Any]) -> bool:
    same_boot = process["host"] == socket.gethostname() and process["boot_id"] == _boot_id() != ""
    return same_boot and _start_time(process["pid"]) != process["started"]


def _read_writer(path: Path) -> dict[str, Any] | None:
    data = durable.read_fresh(path)
    if data is None:
        return None
    value = read_json_object(data, path)
    check_format(value, path)
    return value


def _wait_until_writer_is_dead(path: Path) -> None:
    """Return when no writer can be alive; at most one ttl of watching, then WriterActiveError."""
    first = _read_writer(path)
    if first is None or first["closed"] or _is_gone_from_this_host(first["process"]):
        return
    deadline = time.monotonic() + first["ttl_s"]
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        writer = _read_writer(path)
        if writer is None or writer["closed"]:
            return
        if (writer["epoch"], writer["beat"]) != (first["epoch"], first["beat"]):
            raise WriterActiveError(
                f"{path.parent} has a live writer: {writer['owner']}, run {writer['run_id']}, epoch "
                f"{writer['epoch']} (its beat moves). Stop it first, or give this job another exchange."
            )


def _sweep(exchange: Exchange, epoch: int) -> list[str]:
    """Remove what dead writers left: directories that no entry names, of epochs before ours."""
    exchange.log.absorb()
    named = {entry.dir for entry in exchange.log.versions}
    removed = []
    for path in sorted((exchange.path / VERSIONS_NAME).iterdir()):
        match = _DIRECTORY.match(path.name)
        if match and int(match.group(1)) < epoch and f"{VERSIONS_NAME}/{path.name}" not in named:
            durable.remove_tree(path)
            removed.append(path.name)
    durable.sweep_temporaries(exchange.path)
    durable.sweep_temporaries(exchange.path / LOG_NAME)
    return removed


def _mend_latest(exchange: Exchange) -> None:
    """A writer that died between its commit and the pointer leaves the pointer one behind."""
    versions = exchange.log.versions
    newest = versions[-1].number if versions else 0
    if exchange.newest_number() != newest:
        durable.replace(exchange.path / LATEST_NAME, canonical_json({"format": FORMAT, "number": newest}))
