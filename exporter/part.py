"""What one rank writes of a version: units dealt to it, its rows of others; and the record of all that.

Invariant: nothing here is collective, and nothing here is visible to readers: the files lie in the version's
own directory, which counts only once rank 0 has committed it. Called by the publisher on each rank that
writes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..shared.manifest import FileEntry, TensorEntry
from ..shared.version_files import BaseShards, VersionFiles
from .checkpoint_names import CheckpointNames
from .desk import Desk
from .fidelity import Fidelity
from .layer_clone import Gathered
from .row_merge import Piece, RowDigests, RowMerge, shard_specs
from .unit_merge import UnitMerge
from .version_plan import UnitPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What a part holds; travels to rank 0 as JSON."""

    files: list[FileEntry]
    tensors: list[TensorEntry]
    fidelity: dict[str, Fidelity]
    untied: list[str]
    pieces: list[Piece]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PartRecord:
        return cls(
            files=[FileEntry(**entry) for entry in value["files"]],
            tensors=[TensorEntry(**entry | {"shape": tuple(entry["shape"])}) for entry in value["tensors"]],
            fidelity={name: Fidelity(**figures) for name, figures in value["fidelity"].items()},
            untied=value["untied"],
            pieces=[tuple(piece) for piece in value["pieces"]],
        )


class Part:
    """One rank's share of one version. `base_shards` and `row_digests` live as long as the publisher.

    A unit by rows: its owner begins it, every rank writes, and when all have, its owner enters it.
    """

    def __init__(
        self,
        desk: Desk,
        names: CheckpointNames,
        relative_dir: str,
        *,
        rank: int,
        base_shards: BaseShards,
        row_digests: RowDigests,
        is_signed: bool,
    ) -> None:
        self._files = VersionFiles(desk.exchange, relative_dir, base_shards=base_shards, is_signed=is_signed)
        self._merge = UnitMerge(
            files=self._files, checkpoint=desk.checkpoint, names=names, live_base=desk.live_base
        )
        self._checkpoint = desk.checkpoint
        self._rows = RowMerge(
            rank=rank,
            files=self._files,
            checkpoint=desk.checkpoint,
            live_base=desk.live_base,
            digests=row_digests,
        )

    def write_unit(self, plan: UnitPlan, gathered: Gathered) -> None:
        self._merge.write(plan, gathered)

    def begin_unit(self, plan: UnitPlan) -> None:
        self._files.begin_joint_shard(plan.shard_name, shard_specs(plan, self._checkpoint))
        self._merge.link_unchanged(plan)

    def write_rows(self, plan: UnitPlan, gathered: Gathered, *, is_owner: bool) -> None:
        self._rows.write(plan, gathered, is_owner=is_owner)

    def enter_unit(self, plan: UnitPlan) -> None:
        self._files.enter_joint_shard(plan.shard_name, shard_specs(plan, self._checkpoint))

    def record(self) -> PartRecord:
        """Make the names durable, and say what was written."""
        self._files.seal()
        return PartRecord(
            files=self._files.files,
            tensors=self._files.tensors,
            fidelity=self._merge.fidelity | self._rows.fidelity,
            untied=sorted(self._merge.untied),
            pieces=self._rows.pieces,
        )
