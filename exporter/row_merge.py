"""One rank's rows of one unit: merged by the exact rule, rounded once, written into the shard of all ranks.

Invariant: called on every rank with the factors gathered; no collective may come from here. float64 products
have the same bits by rows as whole, so no byte shows the sharding. One adapted module's rows live at a time,
in float64. `unit_merge` is the same for whole units. Follows docs/format.md [2], [4] and [6].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from ..shared.checkpoint import Checkpoint
from ..shared.digest import xxh3_128
from ..shared.durable import FilePart
from ..shared.errors import UnsupportedError, WeightferryError
from ..shared.merge import COMPUTE_DTYPE, round_merged
from ..shared.tensor_bytes import TORCH_DTYPES, bytes_of
from ..shared.tensor_files import ITEM_BYTES, TensorSlot, TensorSpec, plan_file
from ..shared.version_files import VersionFiles
from .fidelity import Fidelity, measure
from .in_place import tuner_layers
from .layer_clone import Gathered, float64_clone, live_base_state, merge_clone, original_class
from .live_base import LiveBase
from .model_walk import Unit
from .row_shards import Rows, rows_of, sliced_factors
from .unit_merge import CHANGED_ADVICE
from .version_plan import UnitPlan

RowDigests = dict[str, str]
# A checkpoint tensor's name, and the bytes of it that a rank wrote: from, up to.
Piece = tuple[str, int, int]


def row_digests(unit: Unit, rank: int) -> RowDigests:
    """Digests of this rank's rows of what is frozen below adapters, while they are known to be the base's."""
    return {name: xxh3_128(bytes_of(rows_of(t, rank).local)) for name, t in _frozen(unit)}


def _frozen(unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in unit.adapted:
        for name, tensor in live_base_state(module).items():
            if name not in unit.moving[prefix]:
                yield prefix + name, tensor


def shard_specs(plan: UnitPlan, checkpoint: Checkpoint) -> list[TensorSpec]:
    specs = checkpoint.specs
    return [specs[name] for name in plan.changed]


@dataclass(slots=True, kw_only=True)
class RowMerge:
    """Writes this rank's rows of one version. `digests`: those of every unit, as the publisher was made."""

    rank: int
    files: VersionFiles
    checkpoint: Checkpoint
    live_base: LiveBase
    digests: RowDigests
    fidelity: dict[str, Fidelity] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    def write(self, plan: UnitPlan, gathered: Gathered, *, is_owner: bool) -> None:
        """Write this rank's part of the unit's shard; its owner also what a fused group takes along."""
        self.live_base.require_none(self._differing(plan), CHANGED_ADVICE)
        slots = {slot.spec.name: slot for slot in plan_file(shard_specs(plan, self.checkpoint)).slots}
        with self.files.open_joint_shard(plan.shard_name) as file:
            for name, rows, exact in self._merged(plan.unit, gathered):
                if rows.is_writer:
                    self._write_rows(file, slots, plan, name, rows, exact)
            for name in plan.taken_along if is_owner else ():
                self._write_piece(file, slots[name], 0, memoryview(self.checkpoint.read_bytes(name)))

    def _differing(self, plan: UnitPlan) -> list[str]:
        return [
            f"{plan.blocks[name][0][0]} (other values)"
            for name, tensor in _frozen(plan.unit)
            if xxh3_128(bytes_of(rows_of(tensor, self.rank).local)) != self.digests[name]
        ]

    def _merged(self, unit: Unit, gathered: Gathered) -> Iterator[tuple[str, Rows, torch.Tensor]]:
        """Name in memory, rows, and those rows merged in float64, of everything that changes."""
        for prefix, module in unit.adapted:
            live = {name: rows_of(tensor, self.rank) for name, tensor in live_base_state(module).items()}
            for name, exact in self._merged_module(module, live, gathered).items():
                yield prefix + name, live[name], exact
        for plain in unit.plain:
            if plain.is_trained:
                rows = rows_of(plain.tensor, self.rank)
                yield plain.name, rows, rows.local.to(COMPUTE_DTYPE)

    def _merged_module(
        self, module: nn.Module, live: dict[str, Rows], gathered: Gathered
    ) -> dict[str, torch.Tensor]:
        first = next(iter(live.values()))
        num_rows = first.end - first.begin
        if not num_rows:
            return {}
        wrappers = [layer for layer in tuner_layers(module) if original_class(layer) is ParamWrapper]
        # PEFT merges a single expert as if it were none: it gets a twin, which is dropped again
        index = torch.arange(first.begin, first.end) if num_rows > 1 or not wrappers else _twice(first.begin)
        own = {
            name: rows.local if len(index) == num_rows else rows.local[[0, 0]] for name, rows in live.items()
        }
        tensors = live_base_state(module)
        memo: dict[int, Any] = {}
        cut = sliced_factors(module, gathered, index.to(first.local.device))
        clone = float64_clone(module, cut | {id(tensors[name]): own[name] for name in live}, memo)
        for layer in wrappers:
            memo[id(layer)].num_experts = len(index)
        merged = merge_clone(clone)
        for name, value in merged.items():
            if value.shape != own[name].shape:
                raise UnsupportedError(
                    f"rows of the merged {name} have shape {list(value.shape)}; those of the base have "
                    f"{list(own[name].shape)}"
                )
        return {name: value[:num_rows] for name, value in merged.items()}

    def _write_rows(
        self,
        file: FilePart,
        slots: dict[str, TensorSlot],
        plan: UnitPlan,
        name: str,
        rows: Rows,
        exact: torch.Tensor,
    ) -> None:
        """Each stretch of these rows goes to the checkpoint tensor that it belongs to."""
        per_row = math.prod(exact.shape[1:])
        start, flat, base = rows.begin * per_row, exact.flatten(), rows.local.flatten()
        is_moving = name in plan.unit.moving_names()
        for on_disk, begin, end in plan.blocks[name]:
            first, last = max(begin, start), min(end, start + flat.numel())
            if first < last:
                part = slice(first - start, last - start)
                before = None if is_moving else base[part]
                self._write_block(file, slots[on_disk], first - begin, flat[part], before)

    def _write_block(
        self, file: FilePart, slot: TensorSlot, first: int, exact: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        """Elements from `first` on of one checkpoint tensor; the base is read from disk if not given."""
        spec = slot.spec
        rounded = round_merged(exact, TORCH_DTYPES[spec.dtype])
        data, at = bytes_of(rounded), first * ITEM_BYTES[spec.dtype]
        if before is None:
            stored = bytearray(self.checkpoint.read_bytes(spec.name, at, at + len(data)))
            before = torch.frombuffer(stored, dtype=rounded.dtype).to(exact.device)
        figures = measure(before, exact, rounded)
        if not figures.is_finite:
            raise WeightferryError(f"the merged {spec.name} is not finite: the training diverged")
        self.fidelity[spec.name] = self.fidelity.get(spec.name, Fidelity()) + figures
        self._write_piece(file, slot, at, data)

    def _write_piece(self, file: FilePart, slot: TensorSlot, at: int, data: memoryview) -> None:
        file.write_at(slot.begin + at, data)
        self.pieces.append((slot.spec.name, at, at + len(data)))


def _twice(row: int) -> torch.Tensor:
    return torch.tensor([row, row])
