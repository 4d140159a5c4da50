"""Which tensors an apply must load, and from where: pure planning, nothing is touched.

Invariant: the plan's tensors are closed under what the engine fuses, and planned + unchanged = all tensors of
the base. A version whose names, shapes or dtypes are not the base's is refused here, before any pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..shared.checkpoint import Checkpoint
from ..shared.errors import IncompatibleError, IntegrityError
from ..shared.fused import close_under_fusion
from ..shared.manifest import FileEntry, Manifest
from ..shared.tensor_files import TensorSpec, read_header
from .engine import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSet:
    """Every tensor of a model that could answer: its digest, and the local file that holds it."""

    digests: dict[str, str]
    files: dict[str, Path]

    @classmethod
    def of_base(cls, checkpoint: Checkpoint, digests: dict[str, str]) -> WeightSet:
        files = {name: checkpoint.path / file for name, file in checkpoint.file_of.items()}
        return cls(digests=dict(digests), files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """What to load to get from one weight set to another."""

    parts: tuple[Part, ...]
    num_tensors: int
    num_unchanged: int
    size_bytes: int


def own_weight_files(manifest: Manifest) -> list[FileEntry]:
    """The files that hold a version's changed tensors."""
    changed = {entry.file for entry in manifest.tensors if entry.changed}
    return [entry for entry in manifest.files if entry.path in changed]


def weight_set(
    manifest: Manifest, staged: dict[str, Path], base: Checkpoint, base_set: WeightSet
) -> WeightSet:
    """The weight set of a staged version; raises if it is not one of this base."""
    found = {e.name: TensorSpec(name=e.name, dtype=e.dtype, shape=e.shape) for e in manifest.tensors}
    _require_same_specs(base.specs, found)
    files = dict(base_set.files)
    for entry in manifest.tensors:
        if entry.changed:
            files[entry.name] = staged[entry.file]
        elif entry.xxh3_128 != base_set.digests[entry.name]:
            raise IncompatibleError(f"{entry.name} is said to be the base's, but has another digest")
    for file in sorted(set(staged.values())):
        require_header(file, {n: spec for n, spec in found.items() if files[n] == file})
    return WeightSet(digests={entry.name: entry.xxh3_128 for entry in manifest.tensors}, files=files)


def plan_reload(active: WeightSet | None, wanted: WeightSet, specs: dict[str, TensorSpec]) -> ReloadPlan:
    """The closed set of tensors that differ; all of them when the engine's state is not known (None)."""
    known = {} if active is None else active.digests
    differing = {name for name, digest in wanted.digests.items() if known.get(name) != digest}
    names = close_under_fusion(differing, wanted.digests)
    by_file: dict[Path, list[str]] = {}
    for name in sorted(names):
        by_file.setdefault(wanted.files[name], []).append(name)
    parts = tuple(Part(file=str(file), tensors=tuple(tensors)) for file, tensors in sorted(by_file.items()))
    return ReloadPlan(
        parts=parts,
        num_tensors=len(names),
        num_unchanged=len(wanted.digests) - len(names),
        size_bytes=sum(specs[name].size_bytes for name in names),
    )


def _require_same_specs(base: dict[str, TensorSpec], found: dict[str, TensorSpec]) -> None:
    for name in sorted(base.keys() | found.keys()):
        if base.get(name) != found.get(name):
            raise IncompatibleError(
                f"tensor {name}: {base.get(name, 'no such tensor')} expected (base), "
                f"{found.get(name, 'no such tensor')} found (version)"
            )


def require_header(file: Path, specs: dict[str, TensorSpec]) -> None:
    """IntegrityError unless the file holds these tensors, so shaped and typed, and no other."""
    held = {name: slot.spec for name, slot in read_header(file).items()}
    for name in sorted(held.keys() | specs.keys()):
        if held.get(name) != specs.get(name):
            raise IntegrityError(
                file,
                f"{name} is not what the manifest says",
                expected=specs.get(name, "no such tensor"),
                found=held.get(name, "no such tensor"),
            )
