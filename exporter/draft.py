"""One version on its way, on the rank that writes: its units, its adapter, the files around, the commit.

Invariant: nothing here is collective. What the log names is never removed, whatever failed afterwards. Called
by the publisher on rank 0. Follows docs/format.md [1] and [5].
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..shared.checkpoint import Checkpoint
from ..shared.commit_log import LogEntry, slot_name
from ..shared.errors import ConfigError
from ..shared.exchange import Exchange, Version
from ..shared.manifest import AdapterEntry
from ..shared.merge import COMPUTE_DTYPE
from ..shared.publication import ManifestFields, Publication
from ..shared.store import open_store
from ..shared.writer import ExchangeWriter
from .adapter_directory import AdapterView
from .checkpoint_files import side_files
from .checkpoint_names import CheckpointNames
from .fidelity import summary
from .layer_clone import Gathered
from .live_base import LiveBase
from .unit_merge import UnitMerge
from .version_plan import UnitPlan

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the writing rank has at hand from start to end."""

    exchange: Exchange
    checkpoint: Checkpoint
    live_base: LiveBase

    @classmethod
    def of(cls, exchange: Exchange | None) -> Desk:
        if exchange is None or exchange.base_dir is None or exchange.base_digests is None:
            raise ConfigError("rank 0 must open the exchange with its base: Exchange.open(url, base=DIR)")
        checkpoint = Checkpoint.open(exchange.base_dir)
        live_base = LiveBase(checkpoint, exchange.base_digests)
        return cls(exchange=exchange, checkpoint=checkpoint, live_base=live_base)


class Draft:
    """Write the units and the adapter, then `commit`; `abandon` after any failure."""

    def __init__(self, desk: Desk, writer: ExchangeWriter, names: CheckpointNames, step: int) -> None:
        self._desk, self._names = desk, names
        self._publication: Publication = writer.begin(step)
        self._merge: UnitMerge | None = None
        self._adapter: AdapterEntry | None = None

    def write_unit(self, plan: UnitPlan, gathered: Gathered) -> None:
        self._merge = self._merge or UnitMerge(
            publication=self._publication,
            checkpoint=self._desk.checkpoint,
            names=self._names,
            live_base=self._desk.live_base,
        )
        self._merge.write(plan, gathered)

    def write_adapter(self, view: AdapterView, gathered: Gathered) -> None:
        self._adapter = view.write(self._publication, gathered, self._desk.exchange.base.model)

    def commit(
        self, *, published: str, world_size: int, device: str, metrics: dict[str, Any]
    ) -> dict[str, str]:
        """Write the files around the weights, then commit; returns what `seen` makes the version of."""
        if self._merge is not None:
            self._publication.write_index()
            for name, data in side_files(self._desk.checkpoint.path, is_untied=bool(self._merge.untied)):
                self._publication.write_file(name, data)
        fields = ManifestFields(
            published=published,
            world_size=world_size,
            adapter=self._adapter,
            metrics=metrics,
            **self._merge_fields(self._merge, device),
        )
        entry = self._commit(fields)
        text = json.dumps(json.loads(entry.to_bytes()))
        where = self._desk.exchange.store.where("")
        return {"url": where, "slot": slot_name(entry.number), "entry": text}

    def abandon(self) -> None:
        """Remove what was written, unless the log names it. What cannot be removed the next writer sweeps."""
        with suppress(Exception):
            if self._committed_entry() is None:
                self._publication.abandon()

    def _merge_fields(self, merge: UnitMerge | None, device: str) -> dict[str, Any]:
        if merge is None:
            return {}
        dtype = str(COMPUTE_DTYPE).removeprefix("torch.")
        return {
            "merge": {"rule": "exact", "dtype": dtype, "device": device},
            "fidelity": summary(merge.fidelity),
            "tied": () if merge.untied else tuple(sorted(self._names.tied.items())),
        }

    def _commit(self, fields: ManifestFields) -> LogEntry:
        try:
            return self._publication.commit(fields).entry
        except Exception as error:
            committed = self._committed_entry()
            if committed is None:
                raise
            # From its log entry on the version counts; the next commit mends the pointer to it.
            _LOG.warning("version %d is committed, but afterwards: %s", committed.number, error)
            return committed

    def _committed_entry(self) -> LogEntry | None:
        """The log's entry for this version, if the commit got that far."""
        log = self._desk.exchange.log
        log.absorb()
        named = (entry for entry in log.versions if entry.dir == self._publication.relative_dir)
        return next(named, None)


def seen(told: dict[str, str]) -> Version:
    """The version that rank 0 committed, on any rank."""
    return Version(open_store(told["url"]), LogEntry.from_bytes(told["entry"].encode(), told["slot"]))
