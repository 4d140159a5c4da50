"""The order in which a model is taken apart: unit after unit, the same on every rank.

A unit is one decoder layer, one block of another stack, or the rest ("outer"); only one unit's tensors live
at a time. Names are those of the base model in memory, free of FSDP, checkpointing, compile and PEFT
wrappers. Called by the publisher; holds references, never tensors that FSDP could swap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from .layer_clone import is_adapted, own_tensors, unwrap

OUTER = "outer"


@dataclass(slots=True, kw_only=True)
class Unit:
    """`adapted`: (name prefix, module) pairs; `plain`: (name, owner, attribute) of all other tensors."""

    key: str
    adapted: list[tuple[str, nn.Module]] = field(default_factory=list)
    plain: list[tuple[str, nn.Module, str]] = field(default_factory=list)


def peft_model(model: nn.Module) -> PeftModel:
    """The PEFT model below the wrappers."""
    inner = unwrap(model)
    if not isinstance(inner, PeftModel):
        raise TypeError(f"expected a PEFT model (peft.get_peft_model), got {type(inner).__name__}")
    return inner


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside the PEFT model."""
    base = unwrap(cast(nn.Module, unwrap(peft_model(model).base_model).model))
    return cast(PreTrainedModel, base)


def reshard_all(model: nn.Module) -> None:
    """Give every FSDP2 unit its sharded parameters back; the root stays unsharded after an eval forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def walk(base: nn.Module) -> list[Unit]:
    """All units of a base model: the blocks of each stack in order, then the outer one."""
    units: dict[str, Unit] = {}
    stacks = _stack_names(base)
    for prefix, module, block in _visit(base, "", None):
        key = _unit_key(block, stacks)
        unit = units.setdefault(key, Unit(key=key))
        if is_adapted(module):
            unit.adapted.append((prefix, module))
        else:
            unit.plain += [(prefix + name, module, name) for name, _ in own_tensors(module)]
    return sorted(units.values(), key=lambda unit: (unit.key == OUTER, unit.key))


Block = tuple[str, int]


def _visit(
    module: nn.Module, prefix: str, block: Block | None
) -> Iterator[tuple[str, nn.Module, Block | None]]:
    """Every module once, with its name prefix and its block (stack, index); adapted ones whole."""
    module = unwrap(module)
    yield prefix, module, block
    if is_adapted(module):
        return
    is_stack = block is None and isinstance(module, nn.ModuleList)
    for name, child in module._modules.items():
        if child is not None:
            inner = (prefix.rstrip("."), int(name)) if is_stack else block
            yield from _visit(child, f"{prefix}{name}.", inner)


def _stack_names(base: nn.Module) -> dict[str, str]:
    """The shard name of each stack: "layer" for the one with most parameters, else its path."""
    sizes: dict[str, int] = {}
    for _, module, block in _visit(base, "", None):
        if block is not None:
            tensors = module.parameters() if is_adapted(module) else (t for _, t in own_tensors(module))
            sizes[block[0]] = sizes.get(block[0], 0) + sum(tensor.numel() for tensor in tensors)
    largest = max(sizes, key=lambda path: sizes[path], default=None)
    return {path: "layer" if path == largest else path.replace(".", "-") for path in sizes}


def _unit_key(block: Block | None, stacks: dict[str, str]) -> str:
    return OUTER if block is None else f"{stacks[block[0]]}-{block[1]:05d}"
