"""Where merged weights come from: a version's own shards, or its adapter folded into this server's base.

Invariant: what `stage` returns lies on this host, belongs to this base, and every digest in it is that of
the bytes in the files. Called by the applier, off the event loop, before anything is paused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..shared.checkpoint import Checkpoint
from ..shared.digest import xxh3_128
from ..shared.errors import DivergedError, IncompatibleError, IntegrityError
from ..shared.exchange import Version
from ..shared.manifest import AdapterModule, Manifest
from ..shared.tensor_files import plan_file, read_header
from .adapter_check import FACTOR_NAMES, WEIGHTS_NAME, adapter_files, stage_adapter
from .engine import Part
from .stager import Stager
from .weights import WeightSet, own_weight_files, weight_set
from .worker_extension import read_tensors

if TYPE_CHECKING:
    import torch

FOLDED_NAME = "folded.safetensors"


class MergedSource(Protocol):
    """One way to bring a version's merged weights to this host."""

    base_set: WeightSet

    def num_bytes(self, manifest: Manifest) -> int:
        """Bytes that `stage` moves, for its deadline."""
        ...

    def stage(self, version: Version) -> WeightSet:
        """Fetch and check; an ApplyError or IntegrityError says what is wrong. The caller drops the files."""
        ...


class ShardSource:
    """The merged shards that the trainer wrote."""

    def __init__(self, stager: Stager, base: Checkpoint, base_digests: dict[str, str]) -> None:
        self._stager, self._base = stager, base
        self.base_set = WeightSet.of_base(base, base_digests)

    def num_bytes(self, manifest: Manifest) -> int:
        return manifest.changed_bytes

    def stage(self, version: Version) -> WeightSet:
        manifest = version.manifest
        if not manifest.tensors:
            raise IncompatibleError(
                "it holds no merged weights: publish 'merged' or 'both', or use --apply fold or adapter"
            )
        staged = self._stager.stage(version, own_weight_files(manifest))
        wanted = weight_set(manifest, staged, self._base, self.base_set)
        self._refuse_parted(wanted)
        for file in staged.values():
            names = [name for name, where in wanted.files.items() if where == file]
            _check_tensors(file, {name: wanted.digests[name] for name in names})
        return wanted

    def _refuse_parted(self, wanted: WeightSet) -> None:
        """An engine with tied embeddings has one matrix for both: the last one loaded would be it."""
        if not _is_tied(self._base.config):
            return
        both = {wanted.digests[name] for name in wanted.digests if _may_be_tied(name.removesuffix(".weight"))}
        if len(both) > 1:
            raise IncompatibleError(
                "its lm_head and its embeddings differ, which the base ties to one matrix: leave them "
                'unadapted, or serve a base with "tie_word_embeddings": false'
            )


class FoldSource:
    """The adapter's bytes alone travel; the exporter's merge rule is applied here, tensor by tensor.

    Bit for bit the trainer's merge: where the version holds merged weights too, their digests must agree.
    """

    def __init__(self, stager: Stager, base: Checkpoint, base_digests: dict[str, str]) -> None:
        self._stager, self._base = stager, base
        self.base_set = WeightSet.of_base(base, base_digests)

    def num_bytes(self, manifest: Manifest) -> int:
        modules = manifest.adapter.modules if manifest.adapter else ()
        specs = self._base.specs
        folded = [specs[name].size_bytes for name in map(_weight_name, modules) if name in specs]
        return sum(file.size_bytes for file in adapter_files(manifest)) + sum(folded)

    def stage(self, version: Version) -> WeightSet:
        directory, _ = stage_adapter(self._stager, version, self._base.specs)
        entry = version.manifest.adapter
        modules = entry.modules if entry else ()
        self._refuse_tied(modules)
        file = directory.parent / FOLDED_NAME
        folded = self._fold(modules, directory / WEIGHTS_NAME, file)
        wanted = WeightSet(
            digests=self.base_set.digests | folded, files=self.base_set.files | dict.fromkeys(folded, file)
        )
        for tensor in version.manifest.tensors:
            if (found := wanted.digests.get(tensor.name)) != tensor.xxh3_128:
                raise IncompatibleError(
                    f"{tensor.name} is {found} when folded here, {tensor.xxh3_128} as the trainer merged it: "
                    "serve with --apply merged"
                )
        return wanted

    def _fold(self, modules: tuple[AdapterModule, ...], adapter: Path, file: Path) -> dict[str, str]:
        """Write every folded weight into one safetensors file, one in memory at a time; their digests."""
        from ..shared.merge import merge_rounded
        from ..shared.tensor_bytes import bytes_of

        by_weight = {_weight_name(module): module for module in modules}
        plan = plan_file(self._base.slots[name].spec for name in by_weight)
        adapter_slots = read_header(adapter)
        digests: dict[str, str] = {}
        with file.open("wb") as output:
            output.write(plan.header)
            for slot in plan.slots:
                name = slot.spec.name
                module = by_weight[name]
                name_a, name_b = (factor.format(module.name) for factor in FACTOR_NAMES)
                factors = dict(read_tensors(adapter, [name_a, name_b], adapter_slots))
                weight = self._base_weight(name)
                merged = merge_rounded(weight, factors[name_a], factors[name_b], module.scaling)
                data = bytes_of(_require_finite(name, merged))
                digests[name] = xxh3_128(data)
                output.write(data)
        return digests

    def _base_weight(self, name: str) -> torch.Tensor:
        """The base's tensor, read anew: it must still be what it was when the server started."""
        ((_, weight),) = read_tensors(self.base_set.files[name], [name], self._base.slots)
        _require_as_it_was(self.base_set, name, weight)
        return weight

    def _refuse_tied(self, modules: tuple[AdapterModule, ...]) -> None:
        """An engine with tied embeddings has one matrix for both, whatever is folded into one of them."""
        for module in modules:
            if _is_tied(self._base.config) and _may_be_tied(module.name):
                raise IncompatibleError(
                    f"the adapter targets {module.name}, which the base ties to another matrix: leave it "
                    "unadapted"
                )


def require_base_as_it_was(parts: tuple[Part, ...], base_set: WeightSet, base: Checkpoint) -> None:
    """IntegrityError if what will be loaded from the base's files changed since the server started."""
    base_files = set(base_set.files.values())
    for part in parts:
        if (file := Path(part.file)) not in base_files:
            continue
        slots = read_header(file)
        for name in part.tensors:
            if (found := slots.get(name)) is None or found.spec != base.slots[name].spec:
                raise _changed_base(base_set, name, base.slots[name].spec, found and found.spec)
        for name, tensor in read_tensors(file, list(part.tensors), slots):
            _require_as_it_was(base_set, name, tensor)


def _require_as_it_was(base_set: WeightSet, name: str, tensor: torch.Tensor) -> None:
    from ..shared.tensor_bytes import bytes_of

    if (found := xxh3_128(bytes_of(tensor))) != base_set.digests[name]:
        raise _changed_base(base_set, name, base_set.digests[name], found)


def _changed_base(base_set: WeightSet, name: str, expected: object, found: object) -> IntegrityError:
    return IntegrityError(
        base_set.files[name],
        f"{name} is not what it was when the server started",
        expected=expected,
        found=found,
        action="restore the base, then start the server again",
    )


def _is_tied(config: dict[str, Any]) -> bool:
    return any(part.get("tie_word_embeddings") for part in (config, config.get("text_config") or {}))


def _may_be_tied(module_name: str) -> bool:
    return module_name.rpartition(".")[2] in ("lm_head", "embed_tokens")


def _weight_name(module: AdapterModule) -> str:
    return f"{module.name}.weight"


def _require_finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    from ..shared.tensor_bytes import is_finite

    if not is_finite(tensor):
        raise DivergedError(f"{name} is not finite: the training diverged")
    return tensor


def _check_tensors(file: Path, digests: dict[str, str]) -> None:
    """What a plan skips as equal is skipped by these digests, so they must be the bytes' own."""
    from ..shared.tensor_bytes import bytes_of

    for name, tensor in read_tensors(file, list(digests)):
        if (found := xxh3_128(bytes_of(tensor))) != digests[name]:
            raise IntegrityError(file, f"{name} has other bytes", expected=digests[name], found=found)
        _require_finite(name, tensor)
