"""Publishing a LoRA model that is in training: the exporter's public face.

Invariants: the model is only read; every rank does the same collectives in the same order; a version appears
on every rank or on none. Every rank that reaches the exchange writes: its own rows of each unit where ranks
hold rows and share a host, else the whole units dealt to it; rank 0 writes the adapter and commits. Called by
the trainer and by people's own loops.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..shared.errors import ConfigError, UnsupportedError
from ..shared.exchange import Exchange, Version
from ..shared.manifest import PUBLISHED_KINDS
from ..shared.retention import GRACE_S
from ..shared.signing import SigningKey
from ..shared.version_files import BaseShards
from ..shared.writer import WRITER_TTL_S, ExchangeWriter
from .adapter_directory import AdapterView
from .checkpoint_names import CheckpointNames
from .collectives import ControlGroup, gather_all, gather_dealt, gathered_in_turn
from .deal import Round, deal
from .desk import Desk, desk_of_this_rank
from .draft import About, Draft, seen
from .model_walk import Unit, base_model, peft_model, reshard_all, walk
from .part import Part, PartRecord
from .refusals import (
    refuse_foreign_base,
    refuse_merged,
    refuse_residual_adapter,
    refuse_unmergeable,
    refuse_unreadable,
    residual_adapters,
)
from .row_merge import RowDigests, row_digests
from .row_shards import factors, merges_by_rows
from .version_plan import Surveyor, UnitPlan

DEADLINE_S = 600.0


class Ticket:
    """A publication; today it has ended when `publish` returns, and `wait` only hands its version out."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def wait(self, deadline_s: float = DEADLINE_S) -> Version:
        """The version, on every rank."""
        return self._version


class Publisher:
    """Publishes the active adapters of one PEFT model into one exchange. A context manager.

    `model`: unsharded, DDP, FSDP2 or FSDP1 (PEFT first, then the outermost unit); it stays as it is, bit for
    bit. FSDP1 wants `use_orig_params=True`.
    `exchange`: on rank 0 opened with `base=DIRECTORY`; other ranks may pass theirs or None, and write too if
    they reach the same exchange and base directory. `publish`:
    "merged", "adapter" or "both". `deadline_s`: how long ranks wait for each other. `keep` (newest versions),
    `keep_every` (steps), `grace_s` and `signing_key` are `ExchangeWriter.become`'s and count on rank 0; by
    default nothing is deleted and nothing signed. Constructor, `publish` and `close` are collective.

    Raises, on every rank alike: ConfigError, UnsupportedError, BaseMismatchError, or PublishError for the
    rest (another live writer, for one).
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange | None,
        *,
        publish: str = "both",
        run_id: str | None = None,
        writer_ttl_s: float = WRITER_TTL_S,
        deadline_s: float = DEADLINE_S,
        keep: int | None = None,
        keep_every: int | None = None,
        grace_s: float = GRACE_S,
        signing_key: SigningKey | None = None,
    ) -> None:
        self._root, self._published = model, publish
        self._has_merged, self._has_adapter = publish != "adapter", publish != "merged"
        self._adapter_keys: dict[str, dict[str, str | torch.Tensor]] = {}
        self._writer: ExchangeWriter | None = None
        self._draft: Draft | None = None
        self._base_shards: BaseShards = {}
        self._control = ControlGroup(deadline_s)
        try:
            self.run_id: str = self._control.from_first(lambda: run_id or f"run-{uuid.uuid4().hex[:8]}")
            first_desk = self._control.together(lambda: self._check_request(exchange))
            self._desk, self._reach = desk_of_this_rank(self._control, first_desk)
            self._units, self._names = self._control.together(self._take_apart)
            self._signature = [unit.signature() for unit in self._units]
            self._plans, self._rounds, self._owners = self._plan()
            self._row_digests = self._control.together(self._digest_rows)
            become = partial(
                ExchangeWriter.become,
                run_id=self.run_id,
                writer_ttl_s=writer_ttl_s,
                keep=keep,
                keep_every=keep_every,
                grace_s=grace_s,
                signing_key=signing_key,
            )
            self._control.together(lambda: self._become_writer(become))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(self, step: int, metrics: dict[str, Any] | None = None) -> Ticket:
        """Publish the model as it is now, as training step `step`. Collective.

        Not to be called between a forward and its backward. `metrics` (JSON values) go into the manifest.
        PublishError on every rank if any rank fails: then nothing appeared, the model is untouched, and the
        next publish works. BaseMismatchError or UnsupportedError likewise, if the base, the set of adapted
        modules or the way that they are merged is no longer what it was when the publisher was made.
        """
        self._control.together(self._check_structure)
        try:
            begun = self._control.from_first(lambda: self._begin(step))
            records = self._write_units(begun) if self._has_merged else []
            if self._has_adapter:
                self._write_adapter()
            told = self._control.from_first(lambda: self._commit(records, metrics or {}))
        except BaseException:
            if self._draft is not None:
                self._draft.abandon()
            raise
        finally:
            self._draft = None
        return Ticket(seen(told))

    def close(self) -> None:
        """Stop being the writer; the next one need not wait."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._control.close()

    def _check_request(self, exchange: Exchange | None) -> Desk | None:
        """Refuse what is wrong with the request itself; returns the desk of rank 0."""
        if self._published not in PUBLISHED_KINDS:
            raise ConfigError(f"publish={self._published!r}; expected one of {', '.join(PUBLISHED_KINDS)}")
        model = peft_model(self._root)
        if self._has_merged:
            refuse_unmergeable(model)
        refuse_merged(model)
        refuse_unreadable(self._root)
        refuse_foreign_base(model)
        if self._has_adapter:
            refuse_residual_adapter(model)
        return Desk.of(exchange) if self._control.rank == 0 else None

    def _take_apart(self) -> tuple[list[Unit], CheckpointNames]:
        reshard_all(self._root)
        if self._has_adapter:
            AdapterView(peft_model(self._root), self._adapter_keys)
        base = base_model(self._root)
        on_disk = self._desk.checkpoint.slots if self._desk else ()
        return self._walk(), CheckpointNames(base, on_disk)

    def _walk(self) -> list[Unit]:
        return walk(base_model(self._root), residual_adapters(peft_model(self._root)))

    def _plan(self) -> tuple[list[UnitPlan], list[Round], Round]:
        """What every version writes of each unit, and which rank does; the same on every rank.

        Rounds of whole units, and of each unit that is written by rows its index and its owner.
        """
        plans = self._survey()

        def tell() -> dict[str, Any]:
            assert self._desk is not None  # asked on rank 0 only
            specs = self._desk.checkpoint.specs
            by_rows = [index for index, plan in enumerate(plans) if self._is_by_rows(plan)]
            dealt = [index for index in range(len(plans)) if index not in by_rows]
            sizes = [plan.size_bytes(specs) for plan in plans]
            num_writers = self._control.world_size if self._reach.all_write else 1
            rounds = deal([sizes[index] for index in dealt], num_writers)
            owners = deal([sizes[index] for index in by_rows], num_writers)
            return {
                "plans": [plan.to_json() for plan in plans],
                "rounds": [[(dealt[at], rank) for at, rank in one] for one in rounds],
                "owners": sorted((by_rows[at], rank) for one in owners for at, rank in one),
            }

        told = self._control.from_first(tell)
        pairs = zip(self._units, told["plans"], strict=True)
        plans = [UnitPlan.from_json(unit, plan) for unit, plan in pairs]
        return plans, told["rounds"], told["owners"]

    def _is_by_rows(self, plan: UnitPlan) -> bool:
        can = self._has_merged and self._reach.share_files and bool(plan.blocks)
        return can and merges_by_rows(plan.unit, self._control.world_size)

    def _digest_rows(self) -> RowDigests:
        """Right after the survey: what this rank holds now is the base's."""
        digests: RowDigests = {}
        for index, _ in self._owners:
            digests |= row_digests(self._plans[index].unit, self._control.rank)
        return digests

    def _survey(self) -> list[UnitPlan]:
        """Compare every live tensor with the base, unit by unit; rank 0 learns what each unit holds."""
        surveyor = None
        if self._control.rank == 0 and (desk := self._desk) is not None:
            surveyor = Surveyor(self._names, desk.checkpoint, desk.live_base, tries_merge=self._has_merged)
        for unit in self._units:

            def look(unit: Unit = unit) -> None:
                gathered = gather_all(unit.everything(), keep=surveyor is not None)
                if surveyor is not None:
                    surveyor.look(unit, gathered)

            self._control.together(look)
        return self._control.together(lambda: surveyor.plan() if surveyor else [])

    def _become_writer(self, become: Callable[[Exchange], ExchangeWriter]) -> None:
        if self._control.rank == 0 and self._desk is not None:
            self._writer = become(self._desk.exchange)

    def _check_structure(self) -> None:
        refuse_merged(peft_model(self._root))
        reshard_all(self._root)
        if [unit.signature() for unit in self._walk()] != self._signature:
            raise UnsupportedError(
                "other modules are adapted, or other tensors trained, than when the publisher was made; "
                "close it and make a new one"
            )
        by_rows = (self._plans[index].unit for index, _ in self._owners)
        if not all(merges_by_rows(unit, self._control.world_size) for unit in by_rows):
            raise UnsupportedError(
                "an adapter that was added since the publisher was made cannot be merged row by row; close "
                "it and make a new one, which writes whole layers"
            )

    def _begin(self, step: int) -> dict[str, Any]:
        """Make the version's directory; returns what the other ranks need to write into it."""
        assert self._desk is not None  # asked on rank 0 only
        assert self._writer is not None
        self._draft = Draft(self._desk, self._writer, step)
        return {"dir": self._draft.relative_dir, "is_signed": self._writer.signing_key is not None}

    def _write_units(self, begun: dict[str, Any]) -> list[PartRecord]:
        """Round after round, gather its units, then merge and write one on each rank; then units by rows.

        After a failure anywhere every rank stops there. Returns, on rank 0, what the ranks wrote.
        """
        part = None
        if self._desk is not None:
            part = Part(
                self._desk,
                self._names,
                begun["dir"],
                rank=self._control.rank,
                base_shards=self._base_shards,
                row_digests=self._row_digests,
                is_signed=begun["is_signed"],
            )
        for dealt in self._rounds:
            self._control.together(partial(self._write_round, part, dealt))
        if self._owners and part is not None:
            self._write_by_rows(part)
        records = self._control.to_first(lambda: part.record().to_json() if part else None)
        return [PartRecord.from_json(record) for record in records if record is not None]

    def _write_round(self, part: Part | None, dealt: Round) -> None:
        plans = [(self._plans[index], rank == self._control.rank) for index, rank in dealt]
        gathered = gather_dealt([(plan.unit.changing(), is_own) for plan, is_own in plans])
        for plan, is_own in plans:
            if part is not None and is_own:
                part.write_unit(plan, gathered)

    def _write_by_rows(self, part: Part) -> None:
        """Owners make the files, all fill them unit by unit, and owners read what lies there."""
        plans = [(self._plans[index], rank == self._control.rank) for index, rank in self._owners]
        own = [plan for plan, is_owner in plans if is_owner]
        self._control.together(lambda: [part.begin_unit(plan) for plan in own])
        for plan, is_owner in plans:
            self._control.together(partial(self._write_rows, part, plan, is_owner))
        self._control.together(lambda: [part.enter_unit(plan) for plan in own])

    def _write_rows(self, part: Part, plan: UnitPlan, is_owner: bool) -> None:
        part.write_rows(plan, gather_all(factors(plan.unit), keep=True), is_owner=is_owner)

    def _write_adapter(self) -> None:
        view = self._control.together(lambda: AdapterView(peft_model(self._root), self._adapter_keys))

        def write() -> None:
            with gathered_in_turn(view.in_file_order()) as in_turn:
                if self._draft is not None:
                    self._draft.write_adapter(view, in_turn)

        self._control.together(write)

    def _commit(self, records: list[PartRecord], metrics: dict[str, Any]) -> dict[str, str]:
        assert self._draft is not None  # asked on rank 0 only
        about = About(
            published=self._published,
            by_rows=[name for index, _ in self._owners for name in self._plans[index].changed],
            world_size=self._control.world_size,
            device=next(self._root.parameters()).device.type,
            tied=self._names.tied,
            metrics=metrics,
        )
        return self._draft.commit(about, records)
