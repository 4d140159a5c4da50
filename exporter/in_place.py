"""Merging the adapters of one unit into the live weights, and taking them out again.

A change is decided first, from whole tensors and by the exact rule, and then written into the part of each
tensor that this rank holds; nothing is written before the whole unit is decided. Invariant: what is written
below a sharded tensor is its own storage, never a copy that FSDP made for a forward. Nothing here is
collective: the whole tensors come from `collectives.gather_all`. Called by `merged_context`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..shared.errors import UnsupportedError
from ..shared.merge import round_merged
from ..shared.tensor_bytes import bytes_of
from .fsdp1 import own_part, place_of
from .layer_clone import Gathered, base_of, float64_clone, live_base_state, merged_state, unwrap
from .model_walk import Unit

_REVERSIBLE = 1e-6  # relative; float64 keeps 1e-15, a bfloat16 weight is known to 4e-3

_UNTIE = "publish, which unties them, or load the base with tie_word_embeddings=False"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One live tensor under its names in the base, and what this rank is to hold of it."""

    names: list[str]
    tensor: torch.Tensor
    part: torch.Tensor

    def write(self) -> None:
        held_part(self.tensor).copy_(self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A live PEFT layer, the adapters that its weight holds by now, and what PEFT needs to take them out."""

    layer: Any
    adapters: list[str]
    caches: dict[str, Any]

    def set(self) -> None:
        """PEFT's forward then uses the weight alone."""
        self.layer.merged_adapters.extend(self.adapters)

    def remove(self) -> None:
        self.layer.merged_adapters.clear()


def held_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a live tensor; writing into it changes the model. Not while FSDP computes."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def part_of(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What this rank is to hold of a new whole value of a live tensor."""
    if (place := place_of(tensor)) is not None:
        return own_part(whole, place).clone()
    if isinstance(tensor, DTensor):
        spread = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        return spread.to_local().clone()
    return whole


def tuner_layers(module: nn.Module) -> list[Any]:
    """PEFT's layers in and below an adapted module, outermost first; none in one that is trained whole."""
    return [inner for inner in module.modules() if isinstance(inner, BaseTunerLayer)]


def merge_unit(unit: Unit, gathered: Gathered, *, is_reversible: bool) -> tuple[list[Change], list[Mark]]:
    """What merging the unit changes. With `is_reversible`, refuse what PEFT could not take out again."""
    changes: dict[int, Change] = {}
    marks: list[Mark] = []
    for prefix, module in unit.adapted:
        layers = tuner_layers(module)
        if not layers:
            continue
        memo: dict[int, Any] = {}
        merged, live = merged_state(module, gathered, memo), live_base_state(module)
        for name, value in merged.items():
            _add(changes, prefix + name, live[name], gathered[id(live[name])], value)
        clones = [memo[id(layer)] for layer in layers]
        marks += [_mark(layer, clone) for layer, clone in zip(layers, clones, strict=True)]
        if is_reversible:
            _require_reversible(prefix, live, gathered, _taken_out(memo[id(unwrap(module))], clones))
    return list(changes.values()), marks


def unmerge_unit(unit: Unit, gathered: Gathered, marks: list[Mark]) -> list[Change]:
    """What taking the adapters out of the rounded weights changes: arithmetic, so not the same bits."""
    caches = {id(mark.layer): mark.caches for mark in marks}
    changes: dict[int, Change] = {}
    for prefix, module in unit.adapted:
        if not (layers := tuner_layers(module)):
            continue
        memo: dict[int, Any] = {}
        clone, live = float64_clone(module, gathered, memo), live_base_state(module)
        clones = [memo[id(layer)] for layer in layers]
        for layer, inner in zip(layers, clones, strict=True):
            if caches[id(layer)]:
                inner._caches = dict(caches[id(layer)])
        for name, value in _taken_out(clone, clones).items():
            _add(changes, prefix + name, live[name], gathered[id(live[name])], value)
    return list(changes.values())


def base_names(units: list[Unit]) -> dict[int, set[str]]:
    """All names of each of the base's tensors that acts by itself: several if it is tied."""
    names: dict[int, set[str]] = {}
    for unit in units:
        for name, tensor in _acting(unit):
            names.setdefault(id(tensor), set()).add(name)
    return names


def refuse_tied(changes: list[Change], names: dict[int, set[str]]) -> None:
    """Raise UnsupportedError if a change would reach a place that it is not meant for."""
    for change in changes:
        if others := sorted(names[id(change.tensor)] - set(change.names)):
            raise UnsupportedError(
                f"{change.names[0]} is one tensor with {others[0]}, which its adapter must not change; in "
                f"place it would; {_UNTIE}"
            )


def _acting(unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    for plain in unit.plain:
        yield plain.name, plain.tensor
    for prefix, module in unit.adapted:
        if tuner_layers(module):
            yield from ((prefix + name, tensor) for name, tensor in live_base_state(module).items())


def _add(
    changes: dict[int, Change], name: str, tensor: torch.Tensor, before: torch.Tensor, value: torch.Tensor
) -> None:
    """Take one new value in, rounded once, unless it has the bits of the old one."""
    if not before.is_floating_point():
        return
    after = round_merged(value, before.dtype)
    if _same_bits(after, before):
        return
    change = Change(names=[name], tensor=tensor, part=part_of(after, tensor))
    earlier = changes.setdefault(id(tensor), change)
    if earlier is change:
        return
    if not _same_bits(earlier.part, change.part):
        raise UnsupportedError(
            f"{name} is one tensor with {earlier.names[0]}, but their adapters differ; in place it can hold "
            f"one; {_UNTIE}"
        )
    earlier.names.append(name)


def _mark(layer: Any, clone: Any) -> Mark:
    caches = dict(getattr(clone, "_caches", {}))
    return Mark(layer=layer, adapters=list(clone.merged_adapters), caches=caches)


def _taken_out(clone: Any, layers: list[Any]) -> dict[str, torch.Tensor]:
    """The base's tensors of a merged clone after PEFT has unmerged its layers, innermost first."""
    with torch.no_grad():
        for layer in reversed(layers):
            if layer.merged:
                layer.unmerge()
    return dict(base_of(clone).state_dict())


def _require_reversible(
    prefix: str, live: dict[str, torch.Tensor], gathered: Gathered, found: dict[str, torch.Tensor]
) -> None:
    for name, tensor in live.items():
        before = gathered[id(tensor)]
        if before.is_floating_point() and before.numel():
            error = (found[name] - before).abs().max()
            if not error <= _REVERSIBLE * before.abs().max():
                raise UnsupportedError(
                    f"PEFT's unmerge does not give {prefix}{name} back; use merged_lora(model, "
                    'restore="bytes")'
                )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bytes_of(one) == bytes_of(other)
