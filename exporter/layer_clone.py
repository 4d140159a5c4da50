"""Merging one adapted module out of place: clone it onto plain float64 tensors, merge the clone, round once.

Invariant: the model is only read. The clone shares no parameter, hook or FSDP class with it, so PEFT's own
merge, in any of its variants (LoRA, DoRA, experts, ...), acts on the clone alone. Gathering takes a DTensor's
storage dtype: an unshard()ed copy would have FSDP's mixed-precision dtype (torch 2.13, fully_shard).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..shared.merge import COMPUTE_DTYPE

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_HOOKS = frozenset(name for name in nn.Module().__dict__ if "hooks" in name)

Convert = Callable[[torch.Tensor], torch.Tensor]


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT put this module in place of one of the base's."""
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def unwrap(module: nn.Module) -> nn.Module:
    """The module below FSDP1, activation-checkpoint and torch.compile wrappers."""
    while True:
        inner = next((module._modules[name] for name in _WRAPPERS if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor in its storage dtype, detached; collective for a DTensor."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    return tensor.detach()


def gather_only(module: nn.Module) -> None:
    """Take part in the collectives of `merged_and_base`, on a rank that does not need the result."""
    _clone(module, _gathered_and_dropped, {})


def base_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The base-named tensors of one adapted module without its adapters, in float64; collective."""
    return _plain_state(_clone(module, _to_compute_dtype, {}), merge=False)


def merged_and_base(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The base-named tensors of one adapted module with its active adapters merged, and before, in float64.

    Collective when parameters are sharded: every rank must call it, or `gather_only`, for the same module.
    """
    clone = _clone(module, _to_compute_dtype, {})
    before = {name: tensor.clone() for name, tensor in _base_layer(clone).state_dict().items()}
    return _plain_state(clone, merge=True), before


def _base_layer(clone: Any) -> nn.Module:
    return clone.get_base_layer() if hasattr(clone, "get_base_layer") else clone.original_module


def _plain_state(clone: Any, *, merge: bool) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        if hasattr(clone, "unload_and_optionally_merge_module"):
            plain = clone.unload_and_optionally_merge_module(
                merge=merge, safe_merge=False, adapter_names=None
            )
        else:
            if merge:
                clone.merge(safe_merge=False)
            plain = clone.get_base_layer()
    return dict(plain.state_dict())


def _gathered_and_dropped(tensor: torch.Tensor) -> torch.Tensor:
    gather(tensor)
    return torch.empty(0)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers, not its children's."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _to_compute_dtype(tensor: torch.Tensor) -> torch.Tensor:
    whole = gather(tensor)
    return whole.to(COMPUTE_DTYPE, copy=True) if whole.is_floating_point() else whole.clone()


def original_class(module: nn.Module) -> type:
    """fully_shard replaces a module's class by a subclass of (FSDPModule, original)."""
    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) else kind


def _clone(module: nn.Module, convert: Convert, memo: dict[int, Any]) -> Any:
    module = unwrap(module)
    if id(module) in memo:
        return memo[id(module)]
    clone = object.__new__(original_class(module))
    memo[id(module)] = clone
    for name, value in module.__dict__.items():
        clone.__dict__[name] = _clone_attribute(name, value, convert, memo)
    return clone


def _clone_attribute(name: str, value: Any, convert: Convert, memo: dict[int, Any]) -> Any:
    if name in _HOOKS:
        return OrderedDict()
    if name == "_parameters":
        return {key: None if p is None else _clone_parameter(p, convert, memo) for key, p in value.items()}
    if name == "_buffers":
        return {key: None if buffer is None else convert(buffer) for key, buffer in value.items()}
    if name == "_modules":
        return {key: None if child is None else _clone(child, convert, memo) for key, child in value.items()}
    if isinstance(value, list):
        return [_clone(item, convert, memo) if isinstance(item, nn.Module) else item for item in value]
    return value.copy() if isinstance(value, dict | set) else value


def _clone_parameter(parameter: nn.Parameter, convert: Convert, memo: dict[int, Any]) -> nn.Parameter:
    """Tied parameters stay tied in the clone."""
    if id(parameter) not in memo:
        memo[id(parameter)] = nn.Parameter(convert(parameter), requires_grad=False)
    return memo[id(parameter)]
