"""One version on its way, on the rank that commits: its adapter, the files around the weights, the commit.

Invariant: nothing here is collective. What the log names is never removed, whatever failed afterwards. Called
by the publisher on rank 0. Follows docs/format.md [1] and [5].
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..shared.commit_log import LogEntry, slot_name
from ..shared.errors import WeightferryError
from ..shared.exchange import Version
from ..shared.manifest import AdapterEntry
from ..shared.merge import COMPUTE_DTYPE
from ..shared.publication import ManifestFields, Publication
from ..shared.store import open_store
from ..shared.writer import ExchangeWriter
from .adapter_directory import AdapterView
from .checkpoint_files import side_files
from .desk import Desk
from .fidelity import Fidelity, summary
from .part import PartRecord
from .row_shards import tiles

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the publisher knows of a version: its kind, and the model's; `tied` as in CheckpointNames.

    `by_rows`: the tensors that several ranks wrote together.
    """

    published: str
    by_rows: list[str]
    world_size: int
    device: str
    tied: dict[str, str]
    metrics: dict[str, Any]


class Draft:
    """Write the adapter, then `commit`; `abandon` after any failure."""

    def __init__(self, desk: Desk, writer: ExchangeWriter, step: int) -> None:
        self._desk = desk
        self._publication: Publication = writer.begin(step)
        self._adapter: AdapterEntry | None = None

    @property
    def relative_dir(self) -> str:
        return self._publication.relative_dir

    def write_adapter(self, view: AdapterView, in_turn: Iterator[torch.Tensor]) -> None:
        self._adapter = view.write(self._publication, in_turn, self._desk.exchange.base.model)

    def commit(self, about: About, parts: list[PartRecord]) -> dict[str, str]:
        """Write the files around the weights, then commit; returns what `seen` makes the version of.

        `parts`: what the ranks wrote of merged weights, if the version has any.
        """
        for part in parts:
            self._publication.enter(part.files, part.tensors)
        self._require_whole(about.by_rows, parts)
        is_untied = any(part.untied for part in parts)
        if about.published != "adapter":
            self._publication.write_index()
            for name, data in side_files(self._desk.checkpoint.path, is_untied=is_untied):
                self._publication.write_file(name, data)
        fields = ManifestFields(
            published=about.published,
            world_size=about.world_size,
            adapter=self._adapter,
            metrics=about.metrics,
            **self._merge_fields(about, parts, is_untied=is_untied),
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

    def _require_whole(self, by_rows: list[str], parts: list[PartRecord]) -> None:
        """Every byte of what ranks wrote together was written, once: a gap would be read as zeros."""
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in by_rows}
        for name, begin, end in (piece for part in parts for piece in part.pieces):
            spans[name].append((begin, end))
        for name, of in spans.items():
            size = self._desk.checkpoint.specs[name].size_bytes
            if not tiles(sorted(of), size):
                raise WeightferryError(
                    f"the ranks did not write the whole of {name} ({size} bytes), or wrote some of it twice: "
                    f"{sorted(of)}; nothing was published, please report this with the model's sharding"
                )

    def _merge_fields(self, about: About, parts: list[PartRecord], *, is_untied: bool) -> dict[str, Any]:
        if about.published == "adapter":
            return {}
        dtype = str(COMPUTE_DTYPE).removeprefix("torch.")
        figures: dict[str, Fidelity] = {}
        for part in parts:
            for name, found in part.fidelity.items():
                figures[name] = figures.get(name, Fidelity()) + found
        return {
            "merge": {"rule": "exact", "dtype": dtype, "device": about.device},
            "fidelity": summary(figures),
            "tied": () if is_untied else tuple(sorted(about.tied.items())),
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
