"""Merging one adapted module out of place: clone it onto plain float64 tensors and let PEFT merge the clone.

Invariant: the model is only read. A clone shares no parameter, hook or FSDP class with it, so PEFT's own
merge, in any of its variants (LoRA, DoRA, experts, trainable tokens, ...), acts on the clone alone. Nothing
here is collective: the whole tensors come from `collectives.gather_all`, by the id() of the live ones.
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
from torch.nn.parallel import DistributedDataParallel

from ..shared.merge import COMPUTE_DTYPE

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_HOOKS = frozenset(name for name in nn.Module().__dict__ if "hooks" in name)

Convert = Callable[[torch.Tensor], torch.Tensor]
Gathered = dict[int, torch.Tensor]


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT put this module in place of one of the base's."""
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def unwrap(module: nn.Module) -> nn.Module:
    """The module below FSDP1, DDP, activation-checkpoint and torch.compile wrappers."""
    while True:
        names = ("module",) if isinstance(module, DistributedDataParallel) else _WRAPPERS
        inner = next((module._modules[name] for name in names if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def original_class(module: nn.Module) -> type:
    """fully_shard replaces a module's class by a subclass of (FSDPModule, original); torch 2.13."""
    kind = type(module)
    return kind.__mro__[module._orig_cls_mro_index] if isinstance(module, FSDPModule) else kind


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers, not its children's."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def all_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Every parameter and buffer that a clone of an adapted module needs, in the same order on every rank."""
    return [*module.parameters(), *module.buffers()]


def base_of(module: Any) -> nn.Module:
    """The base's module below an adapted one, or below its clone."""
    inner = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module
    return unwrap(inner.get_base_layer() if isinstance(inner, BaseTunerLayer) else inner)


def moving_in_base(module: nn.Module) -> set[str]:
    """Names of the base's tensors below an adapted module that training moves: `bias=...`, and buffers.

    Some models move theirs without a gradient (expert balancing), also below an adapted router.
    """
    base = base_of(plain_clone(module, lambda tensor: tensor))  # FSDP1 inside would show in the names
    frozen = {name for name, parameter in base.named_parameters() if not parameter.requires_grad}
    return set(base.state_dict(keep_vars=True)) - frozen


def base_state(module: nn.Module, gathered: Gathered) -> dict[str, torch.Tensor]:
    """The base's tensors below an adapted module, in their storage dtypes."""
    return dict(base_of(plain_clone(module, lambda tensor: gathered[id(tensor)])).state_dict())


def live_base_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The same names, and the model's own tensors, which may be sharded."""
    return dict(base_of(plain_clone(module, lambda tensor: tensor)).state_dict(keep_vars=True))


def merged_state(
    module: nn.Module, gathered: Gathered, memo: dict[int, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The same names with the active adapters merged, in float64, before any rounding.

    `memo` receives the merged clone of each live module, by the live one's id().
    """
    return merge_clone(float64_clone(module, gathered, memo))


def merge_clone(clone: Any) -> dict[str, torch.Tensor]:
    """Have PEFT merge the active adapters of a clone; the base's tensors below it."""
    with torch.no_grad():
        if hasattr(clone, "unload_and_optionally_merge_module"):
            plain = clone.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            clone.merge(safe_merge=False)
            plain = clone.get_base_layer()
    return dict(plain.state_dict())


def float64_clone(module: nn.Module, gathered: Gathered, memo: dict[int, Any] | None = None) -> Any:
    """A clone onto float64 copies of the whole tensors; what counts or indexes keeps its dtype."""

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        whole = gathered[id(tensor)]
        return whole.to(COMPUTE_DTYPE, copy=True) if whole.is_floating_point() else whole.clone()

    return plain_clone(module, widened, memo)


def plain_clone(module: nn.Module, convert: Convert, memo: dict[int, Any] | None = None) -> Any:
    """The module and all below it without wrappers, hooks and FSDP classes, its tensors converted.

    `convert` may return the tensor itself: then the clone refers to the model's own, and is only for looking.
    """
    memo = {} if memo is None else memo
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
        return {
            key: None if child is None else plain_clone(child, convert, memo) for key, child in value.items()
        }
    if isinstance(value, list):
        return [plain_clone(item, convert, memo) if isinstance(item, nn.Module) else item for item in value]
    return value.copy() if isinstance(value, dict | set) else value


def _clone_parameter(parameter: nn.Parameter, convert: Convert, memo: dict[int, Any]) -> nn.Parameter:
    """Tied parameters stay tied in the clone."""
    if id(parameter) not in memo:
        converted = convert(parameter)
        is_itself = converted is parameter
        memo[id(parameter)] = parameter if is_itself else nn.Parameter(converted, requires_grad=False)
    return memo[id(parameter)]
