"""What a publication will write, decided once: which checkpoint tensors of which unit change.

One pass over the live base compares it with the exchange's, tensor by tensor, and learns on the way which
checkpoint tensors each unit holds. The rest is pure. Follows docs/format.md [2] `changed` and [3].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..shared.checkpoint import Checkpoint
from ..shared.digest import xxh3_128
from ..shared.errors import BaseMismatchError, UnsupportedError
from ..shared.fused import close_under_fusion
from ..shared.tensor_bytes import TORCH_DTYPES, bytes_of
from ..shared.tensor_files import TensorSpec
from .checkpoint_names import CheckpointNames
from .layer_clone import base_state, gather
from .model_walk import OUTER, Unit

_NAMED_AT_MOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """One unit's checkpoint tensors: written anew (`changed`) or linked from the base."""

    unit: Unit
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]


def gather_base(unit: Unit) -> dict[str, torch.Tensor]:
    """All tensors of a unit without adapters, under in-memory names; collective.

    Adapted modules come in float64, the others as they are stored.
    """
    tensors = {prefix + name: t for prefix, m in unit.adapted for name, t in base_state(m).items()}
    for name, owner, attribute in unit.plain:
        tensors[name] = gather(getattr(owner, attribute))
    return tensors


def in_memory_targets(unit: Unit, gathered: Iterable[str]) -> set[str]:
    """In-memory names of the tensors of adapted modules."""
    prefixes = tuple(prefix for prefix, _ in unit.adapted)
    return {name for name in gathered if prefixes and name.startswith(prefixes)}


def held_tensors(
    unit: Unit, tensors: dict[str, torch.Tensor], names: CheckpointNames
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The unit's tensors under checkpoint names, and which of those come from adapted modules."""
    targets = in_memory_targets(unit, tensors)
    reverted = names.revert({n: t for n, t in tensors.items() if n not in names.tied or n in targets})
    of_targets = names.revert({n: t for n, t in tensors.items() if n in targets})
    if missing := of_targets.keys() - reverted.keys():
        raise UnsupportedError(
            f"{unit.key}: transformers converts {some(missing)} only together with tensors outside the "
            "adapter; adapt the whole module"
        )
    return reverted, set(of_targets)


def check_live_base(
    unit: Unit, reverted: dict[str, torch.Tensor], checkpoint: Checkpoint, digests: dict[str, str]
) -> None:
    """Raise BaseMismatchError unless every live tensor is the checkpoint's, bit for bit once in its dtype."""
    for name, live in reverted.items():
        spec = checkpoint.slots[name].spec if name in checkpoint.slots else None
        if spec is None or tuple(live.shape) != spec.shape:
            found = TensorSpec(name=name, dtype=str(live.dtype), shape=tuple(live.shape))
            raise BaseMismatchError(
                f"{checkpoint.path} does not hold this model's {found} (it has {spec}): the model in "
                "training was not made from this base"
            )
        stored = live.to(TORCH_DTYPES[spec.dtype])
        if not torch.equal(stored.to(live.dtype), live) or xxh3_128(bytes_of(stored)) != digests[name]:
            raise BaseMismatchError(
                f"the model in training differs from {checkpoint.path} in {name} ({unit.key}); load it from "
                "that directory, in its dtype or a wider one, and keep the base frozen"
            )


def plan_units(
    units: list[Unit], held: dict[str, set[str]], targets: dict[str, set[str]], checkpoint: Checkpoint
) -> list[UnitPlan]:
    """Divide the checkpoint's tensors over the units; what no unit holds goes to the outer one."""
    everything = set(checkpoint.slots)
    unplaced = everything - set().union(*held.values())
    plans = []
    for unit in units:
        mine = held[unit.key] | (unplaced if unit.key == OUTER else set())
        changed = close_under_fusion(targets[unit.key], mine) | targets[unit.key]
        plans.append(
            UnitPlan(unit=unit, changed=tuple(sorted(changed)), unchanged=tuple(sorted(mine - changed)))
        )
    return plans


def some(names: Iterable[str]) -> str:
    """A few names of many, for an error."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED_AT_MOST} more" if len(ordered) > _NAMED_AT_MOST else ""
    return ", ".join(ordered[:_NAMED_AT_MOST]) + more
