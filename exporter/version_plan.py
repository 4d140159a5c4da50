"""What a publication will write, decided once: which checkpoint tensors of which unit change.

One pass over the live base learns which checkpoint tensors each unit holds and which of them adapters or
training reach; the rest is pure. Decided by structure, never by values, so that every version of a run ships
the same tensors; only whether a tied pair is still equal shows in the values. Follows docs/format.md [2]
`changed` and [4].
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..shared.checkpoint import Checkpoint
from ..shared.errors import BaseMismatchError, UnsupportedError
from ..shared.fused import close_under_fusion
from ..shared.tensor_files import TensorSpec
from .checkpoint_names import CheckpointNames
from .layer_clone import Gathered, base_state
from .live_base import LiveBase, some
from .model_walk import OUTER, Unit
from .refusals import MergeTrial
from .row_shards import Block, blocks_of

_LOAD_ADVICE = "load it from that directory, in its dtype or a wider one, and keep the base frozen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A tied pair of which an adapter or training reaches a part; `spec` is the duplicate's.

    `is_stored`: the base checkpoint stores the duplicate too, so that a version must as well.
    """

    spec: TensorSpec
    kept: str
    is_stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """One unit's checkpoint tensors: written anew (`changed`) or linked from the base.

    `blocks`: by in-memory name, where each changing tensor stands in the checkpoint, if every one of them can
    be written by rows; else empty.
    """

    unit: Unit
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    ties: tuple[Tie, ...] = ()
    blocks: dict[str, list[Block]] = field(default_factory=dict)

    @property
    def shard_name(self) -> str:
        return f"{self.unit.key}.safetensors"

    @property
    def taken_along(self) -> list[str]:
        """Changed tensors that nothing adapts: they go with what the engine fuses them to."""
        merged = {block[0] for blocks in self.blocks.values() for block in blocks}
        return [name for name in self.changed if name not in merged]

    def size_bytes(self, specs: dict[str, TensorSpec]) -> int:
        """What a version writes anew for it, at most."""
        return sum(specs[name].size_bytes for name in self.changed) + sum(
            tie.spec.size_bytes for tie in self.ties
        )

    def to_json(self) -> dict[str, Any]:
        """Without the unit, which every rank has of its own."""
        ties = [asdict(tie) for tie in self.ties]
        lists = {"changed": self.changed, "unchanged": self.unchanged}
        return lists | {"ties": ties, "blocks": self.blocks}

    @classmethod
    def from_json(cls, unit: Unit, value: dict[str, Any]) -> UnitPlan:
        ties = (tie | {"spec": _spec_from_json(tie["spec"])} for tie in value["ties"])
        return cls(
            unit=unit,
            changed=tuple(value["changed"]),
            unchanged=tuple(value["unchanged"]),
            ties=tuple(Tie(**tie) for tie in ties),
            blocks={name: [tuple(block) for block in of] for name, of in value["blocks"].items()},
        )


@dataclass(slots=True, kw_only=True)
class UnitSurvey:
    """What one unit holds (checkpoint names), what of it changes, and what is not the base's.

    `blocks` as in UnitPlan.
    """

    held: set[str] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    ties: list[Tie] = field(default_factory=list)
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)


class Surveyor:
    """Looks at one unit after another, on the rank that writes, and then plans all versions of the run."""

    def __init__(
        self, names: CheckpointNames, checkpoint: Checkpoint, live_base: LiveBase, *, tries_merge: bool
    ) -> None:
        self._names, self._checkpoint, self._live_base = names, checkpoint, live_base
        self._specs = checkpoint.specs
        self._trial = MergeTrial() if tries_merge else None
        self._surveys: list[tuple[Unit, UnitSurvey]] = []

    def look(self, unit: Unit, gathered: Gathered) -> None:
        """Take one unit in; raises UnsupportedError for what cannot be merged."""
        self._surveys.append((unit, self._survey(unit, gathered)))
        if self._trial is not None:
            self._trial.refuse_failing(unit, gathered)

    def plan(self) -> list[UnitPlan]:
        """The plan of every unit; BaseMismatchError unless the live base is the checkpoint."""
        differing = [found for _, survey in self._surveys for found in survey.differing]
        self._live_base.require_none(differing, _LOAD_ADVICE)
        return plan_units(self._surveys, self._checkpoint, self._names)

    def _survey(self, unit: Unit, gathered: Gathered) -> UnitSurvey:
        """Revert the unit's tensors to checkpoint names and compare those that are frozen with the base."""
        tensors, targets, trained = _in_memory(unit, gathered)
        aliases = tensors.keys() & self._names.tied.keys()
        whole = self._names.revert({n: t for n, t in tensors.items() if n not in aliases})
        changing = self._names_of(tensors, targets - aliases)
        if missing := changing - whole.keys():
            raise UnsupportedError(
                f"{unit.key}: transformers converts {some(missing)} only together with tensors outside the "
                "adapter; adapt the whole module"
            )
        moving = self._names_of(tensors, trained - aliases)
        survey = UnitSurvey(held=set(whole), targets=changing)
        survey.differing = self._live_base.differing({n: t for n, t in whole.items() if n not in moving})
        survey.differing += self._live_base.differing_in_shape({n: whole[n] for n in moving})
        for alias in sorted(aliases):
            self._survey_tie(unit, alias, tensors, targets, trained, survey)
        if not survey.ties:
            survey.blocks = blocks_of(tensors, whole, targets, self._names.revert)
        return survey

    def _survey_tie(
        self,
        unit: Unit,
        alias: str,
        tensors: dict[str, torch.Tensor],
        targets: set[str],
        trained: set[str],
        survey: UnitSurvey,
    ) -> None:
        kept = self._names.tied[alias]
        is_touched = bool({alias, kept} & targets)
        if kept not in tensors:
            if is_touched:
                raise UnsupportedError(f"{alias} is tied to {kept} of another unit; leave it unadapted")
            return
        (on_disk,), (kept_on_disk,) = self._names_of(tensors, {alias}), self._names_of(tensors, {kept})
        if alias not in trained:
            survey.differing += self._live_base.differing({kept_on_disk: tensors[alias]})
        is_stored = on_disk in self._specs
        survey.held |= {on_disk} if is_stored else set()
        if is_touched and kept_on_disk in self._specs:
            base = self._specs[kept_on_disk]
            spec = TensorSpec(name=on_disk, dtype=base.dtype, shape=base.shape)
            survey.ties.append(Tie(spec=spec, kept=kept_on_disk, is_stored=is_stored))
            survey.targets.add(kept_on_disk)

    def _names_of(self, tensors: dict[str, torch.Tensor], chosen: set[str]) -> set[str]:
        return set(self._names.revert({name: tensors[name] for name in chosen}))


def plan_units(
    surveys: list[tuple[Unit, UnitSurvey]], checkpoint: Checkpoint, names: CheckpointNames
) -> list[UnitPlan]:
    """Divide the checkpoint's tensors over the units; what the model passes over by design stays the base's.

    BaseMismatchError if the checkpoint has tensors that the model should have and has not.
    """
    unplaced = set(checkpoint.slots) - set().union(*(survey.held for _, survey in surveys))
    if lost := {name for name in unplaced if not names.is_passed_over(name)}:
        raise BaseMismatchError(
            f"the model in training lacks {some(lost)}, which {checkpoint.path} has; build it from that "
            "directory's own config, with the class that loads all of it"
        )
    plans = []
    for unit, survey in surveys:
        mine = survey.held | (unplaced if unit.key == OUTER else set())
        duplicates = {tie.spec.name for tie in survey.ties}
        changed = close_under_fusion(survey.targets, mine) | survey.targets
        plans.append(
            UnitPlan(
                unit=unit,
                changed=tuple(sorted(changed - duplicates)),
                unchanged=tuple(sorted(mine - changed - duplicates)),
                ties=tuple(survey.ties),
                blocks=survey.blocks,
            )
        )
    return plans


def _spec_from_json(value: dict[str, Any]) -> TensorSpec:
    return TensorSpec(name=value["name"], dtype=value["dtype"], shape=tuple(value["shape"]))


def _in_memory(unit: Unit, gathered: Gathered) -> tuple[dict[str, torch.Tensor], set[str], set[str]]:
    """The unit's base by in-memory names; of those the names that change, and those trained in place."""
    tensors: dict[str, torch.Tensor] = {}
    trained: set[str] = set()
    for prefix, module in unit.adapted:
        tensors |= {prefix + name: tensor for name, tensor in base_state(module, gathered).items()}
        trained |= {prefix + name for name in unit.moving[prefix]}
    targets = set(tensors)
    for plain in unit.plain:
        tensors[plain.name] = gathered[id(plain.tensor)]
        if plain.is_trained:
            trained.add(plain.name)
    return tensors, targets | trained, trained
