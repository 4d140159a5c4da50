"""One unit of a version: merge its adapted modules, round once, write what changes, link the rest.

Invariant: called on the rank that the unit is dealt to, after everything was gathered; no collective may come
from here. One unit's merged tensors live at a time, in float64. Follows docs/format.md [2], [4] and [6].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..shared.checkpoint import Checkpoint
from ..shared.errors import UnsupportedError, WeightferryError
from ..shared.merge import COMPUTE_DTYPE, round_merged
from ..shared.tensor_bytes import TORCH_DTYPES, bytes_of
from ..shared.tensor_files import TensorSpec
from ..shared.version_files import VersionFiles
from .checkpoint_names import CheckpointNames
from .fidelity import Fidelity, measure
from .layer_clone import Gathered, base_state, merged_state
from .live_base import LiveBase
from .model_walk import Unit
from .version_plan import Tie, UnitPlan

CHANGED_ADVICE = (
    "it was the base's when the publisher was made. Keep the base frozen, and unmerge adapters that were "
    "merged in place"
)


@dataclass(slots=True, kw_only=True)
class UnitMerge:
    """Merges and writes one rank's units of one version; `untied` collects the pairs that differ by now."""

    files: VersionFiles
    checkpoint: Checkpoint
    names: CheckpointNames
    live_base: LiveBase
    fidelity: dict[str, Fidelity] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)

    def write(self, plan: UnitPlan, gathered: Gathered) -> None:
        """Write the unit's shard of changed tensors, and link its shard of unchanged ones."""
        base = self.names.revert(self._frozen_base(plan.unit, gathered))
        self.live_base.require_none(self.live_base.differing(base), CHANGED_ADVICE)
        merged = self.names.revert(self._merge(plan.unit, gathered))
        specs, read = self.checkpoint.specs, self.checkpoint.read_bytes
        shard: dict[str, tuple[TensorSpec, memoryview]] = {}
        for name in plan.changed:
            if name in merged:
                shard[name] = self._rounded(specs[name], merged.pop(name), base.pop(name, None))
            else:
                shard[name] = (specs[name], memoryview(read(name)))
        for tie in plan.ties:
            self._write_tie(tie, merged.pop(tie.spec.name, None), shard)
        assert not merged, f"merged but not planned: {sorted(merged)}"
        if shard:
            self.files.write_shard(plan.shard_name, list(shard.values()))
        self.link_unchanged(plan)

    def link_unchanged(self, plan: UnitPlan) -> None:
        """Give the version the unit's tensors that equal the base, which the exchange stores once."""
        if plan.unchanged:
            unchanged = [self.checkpoint.specs[name] for name in plan.unchanged]
            name = f"{plan.unit.key}.same.safetensors"
            self.files.link_base_shard(name, unchanged, self.checkpoint.read_bytes)

    def _merge(self, unit: Unit, gathered: Gathered) -> dict[str, torch.Tensor]:
        """Everything that changes, by in-memory names, in float64."""
        merged: dict[str, torch.Tensor] = {}
        for prefix, module in unit.adapted:
            merged |= {prefix + name: t for name, t in merged_state(module, gathered).items()}
        trained = {plain.name: gathered[id(plain.tensor)] for plain in unit.plain if plain.is_trained}
        return merged | {name: tensor.to(COMPUTE_DTYPE) for name, tensor in trained.items()}

    def _frozen_base(self, unit: Unit, gathered: Gathered) -> dict[str, torch.Tensor]:
        """What lies below the adapters, as it is stored; without duplicates of tied tensors."""
        base: dict[str, torch.Tensor] = {}
        for prefix, module in unit.adapted:
            state, moving = base_state(module, gathered), unit.moving[prefix]
            base |= {prefix + name: tensor for name, tensor in state.items() if name not in moving}
        return {name: tensor for name, tensor in base.items() if name not in self.names.tied}

    def _write_tie(
        self, tie: Tie, merged: torch.Tensor | None, shard: dict[str, tuple[TensorSpec, memoryview]]
    ) -> None:
        """A duplicate is written if it differs from its twin by now, or if the base stores it as well."""
        if merged is None:
            own = (tie.spec, memoryview(self.checkpoint.read_bytes(tie.kept)))
        else:
            own = self._rounded(tie.spec, merged, None, twin=tie.kept)
        differs = own[1] != shard[tie.kept][1]
        if differs:
            self.untied.add(tie.spec.name)
        if differs or tie.is_stored:
            shard[tie.spec.name] = own

    def _rounded(
        self, spec: TensorSpec, merged: torch.Tensor, base: torch.Tensor | None, twin: str | None = None
    ) -> tuple[TensorSpec, memoryview]:
        """One merged tensor in the base's dtype, measured; the base is read from disk if not given."""
        if tuple(merged.shape) != spec.shape:
            raise UnsupportedError(
                f"the merged {spec.name} has shape {list(merged.shape)}; the base has {spec}"
            )
        rounded = round_merged(merged, TORCH_DTYPES[spec.dtype])
        before = self._stored(twin or spec.name) if base is None else base
        figures = measure(before.to(merged.device), merged, rounded)
        if not figures.is_finite:
            raise WeightferryError(f"the merged {spec.name} is not finite: the training diverged")
        self.fidelity[spec.name] = figures
        return spec, bytes_of(rounded)

    def _stored(self, name: str) -> torch.Tensor:
        spec = self.checkpoint.specs[name]
        data = bytearray(self.checkpoint.read_bytes(name))
        return torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
