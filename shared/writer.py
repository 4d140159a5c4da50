"""Becoming the one writer of an exchange, and beginning publications.

Invariant: from its epoch entry on, no older writer can commit. `writer.json` only tells people and later
writers who is at work; safety never depends on it. Follows docs/format.md [5] 1 and 2.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from .beat import Beat
from .commit_log import LOG_NAME
from .digest import canonical_json
from .errors import ExchangeError, FormatError, WriterActiveError
from .exchange import BASE_NAME, VERSIONS_NAME, Exchange
from .kill_points import reach
from .lease import READERS_NAME
from .manifest import FORMAT, MANIFEST_NAME, check_format, read_json_object
from .pointer import mend_pointer, require_log_reaches_pointer
from .process import is_gone_from_this_host, owner_name, process_identity
from .publication import Publication
from .retention import GRACE_S, Pruner, PruneReport, RetentionPolicy
from .signing import SigningKey
from .store import Store
from .version_files import BaseShards

WRITER_NAME = "writer.json"
WRITER_TTL_S = 30.0
_POLL_S = 0.2
_LOG = logging.getLogger(__name__)
_WRITER_FIELDS: dict[str, tuple[type, ...]] = {
    "run_id": (str,), "owner": (str,), "epoch": (int,), "beat": (int,), "ttl_s": (int, float),
    "closed": (bool,),
}  # fmt: skip
_IF_NOBODY_WRITES = "it only tells who is at work here: if no trainer is, delete it, and start again"
_DIRECTORY = re.compile(r"step\d{8,}-e(\d{4,})-[0-9a-f]+\Z")


class ExchangeWriter:
    """The writer of one epoch. Make it with `become`; close it when the job ends.

    `sweep_report` lists the unfinished version directories of dead writers that `become` removed.
    """

    def __init__(
        self, exchange: Exchange, *, run_id: str, epoch: int, ttl_s: float, pruner: Pruner | None = None
    ) -> None:
        self.signing_key: SigningKey | None = None
        self.exchange, self.run_id, self.epoch = exchange, run_id, epoch
        self.owner = owner_name()
        self.pruner = pruner or Pruner(exchange, RetentionPolicy())
        self.prune_report = PruneReport()
        self.prune_error: Exception | None = None
        self._ttl_s, self._closed = ttl_s, False
        self.sweep_report = sweep_unfinished(exchange)
        exchange.store.sweep(BASE_NAME)  # only a writer may: another one could be storing a shard there
        mend_pointer(exchange)
        self._beat = Beat(exchange.store, WRITER_NAME, self._content, ttl_s)
        self.base_shards: BaseShards = {}

    @classmethod
    def become(
        cls,
        exchange: Exchange,
        *,
        run_id: str,
        writer_ttl_s: float = WRITER_TTL_S,
        keep: int | None = None,
        keep_every: int | None = None,
        grace_s: float = GRACE_S,
        signing_key: SigningKey | None = None,
    ) -> ExchangeWriter:
        """Take the exchange over, unless another writer lives: then WriterActiveError names it.

        A writer lives if its beat moves within its ttl (seconds) by this process's own clock. One that
        closed cleanly, or whose process is gone from this same host, is not waited for.
        `keep` and `keep_every` are RetentionPolicy's; by default nothing is ever deleted. With a
        `signing_key` every manifest is signed; see `signing.load_signing_key`.
        """
        pruner = Pruner(exchange, RetentionPolicy(keep=keep, keep_every=keep_every), grace_s=grace_s)
        exchange.log.require_dense()
        require_log_reaches_pointer(exchange)
        _wait_until_writer_is_dead(exchange.store)
        entry = exchange.log.append(kind="epoch", epoch=None, run_id=run_id, owner=owner_name())
        writer = cls(exchange, run_id=run_id, epoch=entry.epoch, ttl_s=writer_ttl_s, pruner=pruner)
        writer.signing_key = signing_key
        return writer

    def begin(self, step: int) -> Publication:
        """Start a version for training step `step`; nothing of it is visible before `commit`."""
        name = f"{VERSIONS_NAME}/step{step:08d}-e{self.epoch:04d}-{uuid.uuid4().hex[:6]}"
        return Publication(self, relative_dir=name, step=step)

    def prune(self) -> None:
        """Delete what may go by now; called after each commit, which a failure here must not undo.

        What went wrong is in `prune_error` and in the log; the next commit tries again.
        """
        if self.pruner.policy.keep is None:
            return
        try:
            self.prune_report, self.prune_error = self.pruner.advance(), None
        except (OSError, ExchangeError) as error:
            self.prune_error = error
            _LOG.warning("versions that retention has passed were not all deleted: %s", error)

    def close(self) -> None:
        """Stop beating and say that the next writer need not wait."""
        if not self._closed:
            self._closed = True
            self._beat.close()
            self.exchange.store.replace(WRITER_NAME, canonical_json(self._content(-1)))

    def _content(self, beat: int) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "epoch": self.epoch,
            "owner": self.owner,
            "process": process_identity(),
            "ttl_s": self._ttl_s,
            "beat": beat,
            "closed": self._closed,
        }


def _read_writer(store: Store) -> dict[str, Any] | None:
    """FormatError if it cannot be told whether a writer lives: then a person must say so."""
    data = store.read(WRITER_NAME)
    if data is None:
        return None
    where = store.where(WRITER_NAME)
    try:
        value = read_json_object(data, where)
    except FormatError:
        raise FormatError(f"{where} is no JSON object; {_IF_NOBODY_WRITES}") from None
    check_format(value, where)
    for name, kinds in _WRITER_FIELDS.items():
        if type(value.get(name)) not in kinds:
            raise FormatError(f"{where} has {name} {value.get(name)!r}; {_IF_NOBODY_WRITES}")
    return value


def _wait_until_writer_is_dead(store: Store) -> None:
    """Return when no writer can be alive; at most one ttl of watching, then WriterActiveError."""
    first = _read_writer(store)
    if first is None or first["closed"] or is_gone_from_this_host(first["process"]):
        return
    deadline = time.monotonic() + first["ttl_s"]
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        writer = _read_writer(store)
        if writer is None or writer["closed"]:
            return
        if (writer["epoch"], writer["beat"]) != (first["epoch"], first["beat"]):
            raise WriterActiveError(
                f"{store.where('')} has a live writer: {writer['owner']}, run {writer['run_id']}, epoch "
                f"{writer['epoch']} (its beat moves). Stop it first, or give this job another exchange."
            )


def sweep_unfinished(exchange: Exchange, *, dry_run: bool = False) -> list[str]:
    """Remove what dead writers left: directories that no entry names, of epochs before the reigning one.

    Safe beside a live writer: those of older epochs can never commit. Returns the directories' names.
    """
    log = exchange.log
    log.absorb()
    named = {entry.dir for entry in log.versions}
    removed = []
    for name in exchange.store.list_started(VERSIONS_NAME):
        match = _DIRECTORY.match(name)
        if match and int(match.group(1)) < log.highest_epoch and f"{VERSIONS_NAME}/{name}" not in named:
            removed.append(name)
            if not dry_run:
                directory = f"{VERSIONS_NAME}/{name}"
                exchange.store.remove_tree(directory, first=MANIFEST_NAME, after_first=_mid_sweep)
    if not dry_run:
        for directory in ("", LOG_NAME, READERS_NAME):
            exchange.store.sweep(directory)
    return removed


def _mid_sweep() -> None:
    reach("mid-sweep")
