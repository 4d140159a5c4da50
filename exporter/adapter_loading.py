"""Loading an adapter back into a model in training: exactly, or not at all.

PEFT's own loading only warns of missing keys, and says nothing of surplus ones, of another alpha or of NaN.
Here the directory must hold just the tensors that this model's adapter would be saved as: keys, whole shapes,
dtypes, finite values, the settings that give them their meaning, and the base. Invariant: all ranks check
before any of them writes, so after an error the model is as it was on every rank. Each rank reads the files
itself and writes its own part of each tensor; nothing is gathered. Called by the trainer and by own loops.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import nn

from ..shared.digest import file_xxh3_128
from ..shared.errors import (
    BaseMismatchError,
    ConfigError,
    IntegrityError,
    LoadError,
    PublishError,
    UnsupportedError,
)
from ..shared.exchange import Exchange, Version
from ..shared.manifest import AdapterEntry
from ..shared.tensor_bytes import spec_of
from ..shared.tensor_files import TensorSpec, read_header
from .adapter_directory import CONFIG_NAME, WEIGHTS_NAME, AdapterView
from .collectives import ControlGroup
from .fsdp1 import whole_shape
from .in_place import held_part, part_of
from .layer_clone import live_base_state
from .live_base import some
from .model_walk import base_model, peft_model, reshard_all, walk
from .refusals import refuse_merged, refuse_residual_adapter, refuse_unreadable

DEADLINE_S = 600.0
_BLOCK_BYTES = 16 << 20
# Settings that the keys and shapes show already, or that do not say what a saved tensor means.
_IMMATERIAL = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_ga_config",
    "megatron_config", "megatron_core", "modules_to_save", "peft_version", "revision", "runtime_config",
    "target_modules", "target_parameters", "task_type",
}  # fmt: skip
_WAY_OUT = "give the adapter that this model's settings made, or set what it was made with"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What this rank is to hold of one live tensor."""

    tensor: torch.Tensor
    part: torch.Tensor


def load_adapter(
    model: nn.Module, directory: str | Path, *, any_base: bool = False, deadline_s: float = DEADLINE_S
) -> None:
    """Give the active adapter the values of a PEFT directory. Collective.

    `model`: a PEFT model with one active adapter, unsharded or under DDP, FSDP1 or FSDP2, on any number of
    ranks; every rank sees `directory`. `any_base`: take an adapter that names another base, or none.
    Raises, on every rank alike, and with the model as it was: ConfigError for other keys, shapes, dtypes,
    settings or values that are not finite; BaseMismatchError for another base's name; UnsupportedError for a
    model that cannot take it; LoadError for the rest (a damaged file, a rank that died).
    """
    control = ControlGroup(deadline_s)
    try:
        changes = _together(control, lambda: _decide(model, Path(directory), any_base))
        _require_one_file(control, Path(directory) / WEIGHTS_NAME)
    finally:
        control.close()
    for change in changes:
        held_part(change.tensor).copy_(change.part)


def load_version_adapter(
    model: nn.Module, exchange: Exchange, number: int, *, deadline_s: float = DEADLINE_S
) -> None:
    """The same from a version of an exchange, whose files must have their digests. Collective.

    Every rank opens the exchange. The base is the exchange's, whatever its directory is called; whether it is
    the model's is compared when a Publisher is made. A missing version or damaged file comes as LoadError.
    """
    control = ControlGroup(deadline_s)
    with tempfile.TemporaryDirectory(prefix="weightferry-adapter-") as place:
        try:
            _together(control, lambda: _fetch(exchange, number, Path(place)))
        finally:
            control.close()
        load_adapter(model, place, any_base=True, deadline_s=deadline_s)


def _together(control: ControlGroup, act: Callable[[], T]) -> T:
    try:
        return control.together(act)
    except PublishError as error:
        raise LoadError(error.rank, error.cause) from error


def _decide(model: nn.Module, directory: Path, any_base: bool) -> list[Change]:
    """Check everything; what this rank is to write."""
    peft = peft_model(model)
    refuse_merged(peft)
    refuse_unreadable(model)
    refuse_residual_adapter(peft)
    reshard_all(model)
    view = AdapterView(peft, {})
    config = _read_config(directory)
    ours: dict[str, Any] = json.loads(view.config_bytes(""))
    if not any_base:
        _require_base(directory, ours["base_model_name_or_path"], config.get("base_model_name_or_path"))
    _require_specs(directory, view)
    _require_settings(directory, ours, config)
    return _read_changes(model, view, directory)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_NAME
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; give the directory of a saved PEFT adapter"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; give the directory of a saved PEFT adapter")
    return config


def _require_base(directory: Path, ours: str, theirs: str | None) -> None:
    """One base may stand at two places; its name alone cannot tell."""
    if not theirs or (theirs != ours and os.path.realpath(theirs) != os.path.realpath(ours)):
        raise BaseMismatchError(
            f"the adapter {directory} names {theirs or 'no base'} as its base, the model was loaded from "
            f"{ours}; if they are the same weights, say so (any_base=True, or start_from_any_base = true)"
        )


def _require_specs(directory: Path, view: AdapterView) -> None:
    """Just the tensors that this adapter is saved as."""
    path = directory / WEIGHTS_NAME
    if not path.exists():
        raise ConfigError(f"{path} is not there; give the directory of a saved PEFT adapter")
    found = {name: slot.spec for name, slot in read_header(path).items()}
    if missing := view.tensors.keys() - found.keys():
        surplus = found.keys() - view.tensors.keys()
        instead = f" and has {some(surplus)} instead" if surplus else ""
        raise ConfigError(f"{path} lacks {some(missing)}{instead}; {_WAY_OUT}")
    if surplus := found.keys() - view.tensors.keys():
        raise ConfigError(f"{path} has {some(surplus)}, which this model's adapter has not; {_WAY_OUT}")
    expected = {name: _whole_spec(name, tensor) for name, tensor in view.tensors.items()}
    if differing := [name for name in sorted(found) if found[name] != expected[name]]:
        name = differing[0]
        more = f" (and {len(differing) - 1} more tensors differ)" if len(differing) > 1 else ""
        raise ConfigError(f"{path}: {expected[name]} expected, {found[name]} found{more}; {_WAY_OUT}")


def _whole_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = spec_of(name, torch.empty(0, dtype=tensor.dtype)).dtype
    return TensorSpec(name=name, dtype=dtype, shape=tuple(whole_shape(tensor)))


def _require_settings(directory: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Rank, alpha, scaling, and whatever else gives equal tensors another meaning."""
    for name in sorted(ours.keys() | theirs.keys()):
        if name in _IMMATERIAL or name.startswith("init_") or name.endswith("dropout"):
            continue
        expected, found = _ordered(ours.get(name)), _ordered(theirs.get(name))
        if expected != found:
            raise ConfigError(
                f"{directory / CONFIG_NAME}: {name}: {expected!r} expected (the model's), {found!r} found; "
                f"{_WAY_OUT}"
            )


def _ordered(value: Any) -> Any:
    """PEFT writes its sets of names as lists, in any order."""
    is_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return sorted(value) if is_names else value


def _read_changes(model: nn.Module, view: AdapterView, directory: Path) -> list[Change]:
    fixed, changes = _base_tensors(model), []
    with safe_open(directory / WEIGHTS_NAME, framework="pt") as file:
        for name, tensor in view.tensors.items():
            whole: torch.Tensor = file.get_tensor(name)
            if not whole.isfinite().all():
                raise ConfigError(f"{directory / WEIGHTS_NAME}: {name} is not finite; give an older version")
            part = part_of(whole.to(tensor.device), tensor)
            is_fixed = id(tensor) in fixed or not (tensor.is_floating_point() or tensor.is_complex())
            if not is_fixed:
                changes.append(Change(tensor=tensor, part=part))
            elif not torch.equal(held_part(tensor), part):
                raise BaseMismatchError(
                    f"{directory / WEIGHTS_NAME}: {name} is not trained, and has other values in this model; "
                    "give an adapter of the same base and seed"
                )
    return changes


def _base_tensors(model: nn.Module) -> set[int]:
    """The frozen tensors of the base, which PEFT saves with an adapter of the embeddings."""
    fixed: set[int] = set()
    for unit in walk(base_model(model)):
        for prefix, module in unit.adapted:
            moving = unit.moving[prefix]
            fixed |= {id(t) for name, t in live_base_state(module).items() if name not in moving}
        fixed |= {id(plain.tensor) for plain in unit.plain if not plain.is_trained}
    return fixed


def _require_one_file(control: ControlGroup, path: Path) -> None:
    """Ranks on several hosts may see different files at one path."""
    own = _together(control, lambda: file_xxh3_128(path))
    try:
        first = control.from_first(lambda: own)
    except PublishError as error:
        raise LoadError(error.rank, error.cause) from error

    def compare() -> None:
        if own != first:
            raise IntegrityError(path, "is not the file that rank 0 reads", action="give a shared directory")

    _together(control, compare)


def _fetch(exchange: Exchange, number: int, directory: Path) -> None:
    """Copy the adapter of a version, under a lease, with its digests checked."""
    with exchange.open_version(number, reader=f"load-adapter:{os.getpid()}") as version:
        adapter = version.manifest.adapter
        if adapter is None:
            raise UnsupportedError(
                f"version {number} was published as 'merged' and holds no adapter; give one of 'adapter' or "
                "'both'"
            )
        if not version.manifest.base.is_same_as(exchange.base):
            raise BaseMismatchError(f"version {number} is of {version.manifest.base}, not of {exchange.base}")
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            _copy(version, adapter, name, directory / name)


def _copy(version: Version, adapter: AdapterEntry, name: str, target: Path) -> None:
    path = f"{adapter.dir}/{name}"
    entry = next((file for file in version.manifest.files if file.path == path), None)
    where = version.store.where(path)
    if entry is None or version.leads_out(path):
        raise IntegrityError(where, "is not named by the manifest, or leads out of the exchange")
    digest = entry.digest
    try:
        with version.store.open(path) as source, target.open("wb") as copy:
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                copy.write(block)
    except FileNotFoundError:
        raise IntegrityError(where, "is missing") from None
    entry.check(digest, where)
