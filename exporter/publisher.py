"""Publishing a LoRA model that is in training: the exporter's public face.

Invariants: the model is only read; every rank does the same collectives in the same order; a version appears
on every rank or on none. Rank 0 writes. Called by the trainer and by people's own loops.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from ..shared.checkpoint import INDEX_NAME, Checkpoint
from ..shared.errors import ConfigError, UnsupportedError
from ..shared.exchange import Exchange, Version
from ..shared.manifest import PUBLISHED_KINDS
from ..shared.merge import COMPUTE_DTYPE, round_merged
from ..shared.publication import ManifestFields, Publication
from ..shared.store import open_store
from ..shared.tensor_bytes import TORCH_DTYPES, bytes_of
from ..shared.tensor_files import TensorSpec
from ..shared.writer import WRITER_TTL_S, ExchangeWriter
from .adapter_directory import gather_adapter, write_adapter
from .checkpoint_names import CheckpointNames
from .collectives import ControlGroup
from .fidelity import Fidelity, measure, summary
from .layer_clone import gather_only, merged_and_base
from .model_walk import Unit, base_model, peft_model, reshard_all, walk
from .refusals import refuse_unmergeable
from .version_plan import UnitPlan, check_live_base, gather_base, held_tensors, plan_units

DEADLINE_S = 600.0
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_NOT_COPIED = ("config.json", INDEX_NAME)

T = TypeVar("T")


class Ticket:
    """A publication; today it has ended when `publish` returns, and `wait` only hands its version out."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def wait(self, deadline_s: float = DEADLINE_S) -> Version:
        """The version, on every rank."""
        return self._version


class Publisher:
    """Publishes the active adapters of one PEFT model into one exchange. A context manager.

    `model`: unsharded or FSDP2 (PEFT first, then fully_shard); it stays as it is, bit for bit. `exchange`: on
    rank 0 opened with `base=DIRECTORY`; other ranks may pass theirs or None. `publish`: "merged", "adapter"
    or "both". `deadline_s`: how long ranks wait for each other. Constructor, `publish` and `close` are
    collective.

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
    ) -> None:
        self._root, self._exchange, self._published = model, exchange, publish
        self._control = ControlGroup(deadline_s)
        self.run_id = self._control.broadcast(run_id or f"run-{uuid.uuid4().hex[:8]}")
        self._writer: ExchangeWriter | None = None
        self._units, self._names, self._checkpoint = self._together(self._take_stock)
        self._plans = self._compare_with_base()
        self._together(lambda: self._become_writer(writer_ttl_s))

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(self, step: int, metrics: dict[str, Any] | None = None) -> Ticket:
        """Publish the model as it is now, as training step `step`. Collective.

        `metrics` (JSON values) go into the manifest. PublishError on every rank if any rank fails: then
        nothing appeared, the model is untouched, and the next publish works.
        """
        reshard_all(self._root)
        publication = self._together(lambda: self._begin(step))
        try:
            version = self._write(publication, metrics or {})
        except BaseException:
            if publication is not None:
                publication.abandon()
            raise
        url, entry = self._control.broadcast(None if version is None else (self._url(), version.entry))
        return Ticket(version or Version(open_store(url), entry))

    def close(self) -> None:
        """Stop being the writer; the next one need not wait."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._control.close()

    def _together(self, act: Callable[[], T]) -> T:
        """Run something on this rank, then agree that it failed nowhere."""
        error, result = None, None
        try:
            result = act()
        except Exception as caught:
            error = caught
        self._control.agree(error)
        return result  # type: ignore[return-value]

    def _take_stock(self) -> tuple[list[Unit], CheckpointNames, Checkpoint | None]:
        if self._published not in PUBLISHED_KINDS:
            raise ConfigError(f"publish={self._published!r}; expected one of {', '.join(PUBLISHED_KINDS)}")
        model = peft_model(self._root)
        if self._published != "adapter":
            refuse_unmergeable(model)
        if self._published != "merged" and len(model.active_adapters) != 1:
            raise UnsupportedError(
                f"{len(model.active_adapters)} adapters are active; an adapter directory holds one: "
                "publish 'merged', or activate one"
            )
        checkpoint = None
        if self._control.rank == 0:
            if self._exchange is None or self._exchange.base_dir is None:
                raise ConfigError("rank 0 must open the exchange with its base: Exchange.open(url, base=DIR)")
            checkpoint = Checkpoint.open(self._exchange.base_dir)
        base = base_model(model)
        return walk(base), CheckpointNames(base), checkpoint

    def _compare_with_base(self) -> list[UnitPlan]:
        """Compare every live tensor with the base, unit by unit; rank 0 learns who holds what."""
        reshard_all(self._root)
        held: dict[str, set[str]] = {}
        targets: dict[str, set[str]] = {}
        for unit in self._units:
            tensors = self._together(lambda unit=unit: gather_base(unit))
            self._together(lambda unit=unit, tensors=tensors: self._take_in(unit, tensors, held, targets))
        if self._checkpoint is None:
            return [UnitPlan(unit=unit, changed=(), unchanged=()) for unit in self._units]
        return plan_units(self._units, held, targets, self._checkpoint)

    def _take_in(
        self,
        unit: Unit,
        tensors: dict[str, torch.Tensor],
        held: dict[str, set[str]],
        targets: dict[str, set[str]],
    ) -> None:
        if self._checkpoint is None or self._exchange is None or self._exchange.base_digests is None:
            return
        reverted, targets[unit.key] = held_tensors(unit, tensors, self._names)
        check_live_base(unit, reverted, self._checkpoint, self._exchange.base_digests)
        held[unit.key] = set(reverted)

    def _become_writer(self, ttl_s: float) -> None:
        if self._control.rank == 0 and self._exchange is not None:
            self._writer = ExchangeWriter.become(self._exchange, run_id=self.run_id, writer_ttl_s=ttl_s)

    def _url(self) -> str:
        return "" if self._exchange is None else self._exchange.store.where("")

    def _begin(self, step: int) -> Publication | None:
        return None if self._writer is None else self._writer.begin(step)

    def _write(self, publication: Publication | None, metrics: dict[str, Any]) -> Version | None:
        fidelity: dict[str, Fidelity] = {}
        if self._published != "adapter":
            for plan in self._plans:
                self._together(lambda plan=plan: self._write_unit(publication, plan, fidelity))
        adapter = None
        if self._published != "merged":
            adapter = self._together(lambda: self._write_adapter(publication))

        def finish() -> Version | None:
            if publication is None:
                return None
            self._copy_rest(publication)
            fields = ManifestFields(
                published=self._published,
                world_size=self._control.world_size,
                adapter=adapter,
                merge=None if self._published == "adapter" else self._merge_record(),
                fidelity=summary(fidelity) if fidelity else None,
                tied=tuple(sorted(self._names.tied.items())),
                metrics=metrics,
            )
            return publication.commit(fields)

        return self._together(finish)

    def _write_unit(
        self, publication: Publication | None, plan: UnitPlan, fidelity: dict[str, Fidelity]
    ) -> None:
        merged: dict[str, torch.Tensor] = {}
        before: dict[str, torch.Tensor] = {}
        for prefix, module in plan.unit.adapted:
            if publication is None:
                gather_only(module)
                continue
            after, base = merged_and_base(module)
            merged |= {prefix + name: tensor for name, tensor in after.items()}
            before |= {prefix + name: tensor for name, tensor in base.items()}
        if publication is None or self._checkpoint is None:
            return
        merged, before = self._names.revert(merged), self._names.revert(before)
        specs, read = self._checkpoint.specs, self._checkpoint.read_bytes
        shard = []
        for name in plan.changed:
            if name in merged:
                rounded = _round(merged[name], specs[name])
                fidelity[name] = measure(before[name], merged[name], rounded)
                shard.append((specs[name], bytes_of(rounded)))
            else:
                shard.append((specs[name], read(name)))
        if shard:
            publication.write_shard(f"{plan.unit.key}.safetensors", shard)
        if plan.unchanged:
            publication.link_base_shard(
                f"{plan.unit.key}.same.safetensors", [specs[name] for name in plan.unchanged], read
            )

    def _write_adapter(self, publication: Publication | None) -> Any:
        model = peft_model(self._root)
        (adapter,) = model.active_adapters
        tensors = gather_adapter(model, adapter, keep=publication is not None)
        if publication is None or self._exchange is None:
            return None
        return write_adapter(publication, model, adapter, tensors, self._exchange.base.model)

    def _copy_rest(self, publication: Publication) -> None:
        """Config and tokenizer files, as they stand beside the base."""
        if self._published == "adapter" or self._checkpoint is None:
            return
        publication.write_index()
        publication.write_file("config.json", (self._checkpoint.path / "config.json").read_bytes())
        for path in sorted(self._checkpoint.path.iterdir()):
            if path.is_file() and path.suffix in _COPIED_SUFFIXES and path.name not in _NOT_COPIED:
                publication.write_file(path.name, path.read_bytes())

    def _merge_record(self) -> dict[str, str]:
        device = next(self._root.parameters()).device.type
        return {"rule": "exact", "dtype": str(COMPUTE_DTYPE).removeprefix("torch."), "device": device}


def _round(merged: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if tuple(merged.shape) != spec.shape:
        raise UnsupportedError(f"the merged {spec.name} has shape {tuple(merged.shape)}; the base has {spec}")
    rounded = round_merged(merged, TORCH_DTYPES[spec.dtype])
    if not torch.isfinite(rounded).all():
        raise UnsupportedError(
            f"the merged {spec.name} is not finite: the training diverged; nothing is published"
        )
    return rounded
