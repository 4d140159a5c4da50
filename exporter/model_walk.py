"""The order in which a model is taken apart: unit after unit, the same on every rank.

A unit is one decoder layer, one block of another stack, or the rest ("outer"); only one unit's tensors live
at a time. Names are those of the base model in memory, free of FSDP, checkpointing, compile and PEFT
wrappers. Called by the publisher; holds references, never tensors that FSDP could swap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel

from ..shared.errors import UnsupportedError
from . import fsdp1
from .layer_clone import all_tensors, is_adapted, moving_in_base, own_tensors, unwrap

OUTER = "outer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """One tensor outside adapted modules: its name, and where it is kept."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.owner, self.attribute)

    @property
    def is_trained(self) -> bool:
        """Buffers count: some models move theirs while training (expert balancing), without a gradient."""
        return self.tensor.requires_grad or self.attribute in self.owner._buffers


@dataclass(slots=True, kw_only=True)
class Unit:
    """`adapted`: (name prefix, module) pairs; `plain`: all other tensors.

    `moving`: below the adapted module of each prefix, the names of the base's tensors that need not be the
    checkpoint's: those that training moves, and what PiSSA and its like left of a weight.
    """

    key: str
    adapted: list[tuple[str, nn.Module]] = field(default_factory=list)
    moving: dict[str, frozenset[str]] = field(default_factory=dict)
    plain: list[Plain] = field(default_factory=list)

    def changing(self) -> list[torch.Tensor]:
        """What a publication must gather: everything of adapted modules, and other trained tensors."""
        trained = [plain.tensor for plain in self.plain if plain.is_trained]
        return _once([t for _, module in self.adapted for t in all_tensors(module)] + trained)

    def everything(self) -> list[torch.Tensor]:
        return _once(self.changing() + [plain.tensor for plain in self.plain])

    def moving_names(self) -> set[str]:
        """In-memory names of what training moves, adapters apart."""
        below = {prefix + name for prefix, names in self.moving.items() for name in names}
        return below | {plain.name for plain in self.plain if plain.is_trained}

    def signature(self) -> tuple:
        """What must stay as it is while a publisher lives: which modules are adapted, what is trained."""
        adapted = [(prefix, type(module).__name__, self.moving[prefix]) for prefix, module in self.adapted]
        return self.key, adapted, [(plain.name, plain.is_trained) for plain in self.plain]


def peft_model(model: nn.Module) -> PeftModel:
    """The PEFT model below the wrappers."""
    inner = unwrap(model)
    if not isinstance(inner, PeftModel):
        raise UnsupportedError(
            f"a PEFT model is published (peft.get_peft_model makes one), not a {type(inner).__name__}"
        )
    return inner


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside the PEFT model."""
    peft = peft_model(model)
    tuner = unwrap(cast(nn.Module, peft.base_model))
    has_no_tuner = peft.active_peft_config.is_prompt_learning
    return cast(PreTrainedModel, tuner if has_no_tuner else unwrap(cast(nn.Module, tuner.model)))


def reshard_all(model: nn.Module) -> None:
    """Give every FSDP unit its sharded parameters back; the root stays unsharded after an eval forward.

    A forward that an exception has ended is forgotten: FSDP would not reshard what it thinks in use.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if state._is_root and state._state_ctx.iter_forward_root is not None:
                module.reset_iter_state()
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            fsdp1.reshard(module)


def walk(base: nn.Module, residual_adapters: Collection[str] = ()) -> list[Unit]:
    """All units of a base model: the blocks of each stack in order, then the outer one.

    `residual_adapters` took a part out of the weights that they adapt when they were made.
    """
    units: dict[str, Unit] = {OUTER: Unit(key=OUTER)}
    stacks = _stack_names(base)
    for prefix, module, block in _visit(base, "", None):
        key = _unit_key(block, stacks)
        unit = units.setdefault(key, Unit(key=key))
        if is_adapted(module):
            unit.adapted.append((prefix, module))
            unit.moving[prefix] = _moving(module, residual_adapters)
        else:
            unit.plain += [
                Plain(name=prefix + name, owner=module, attribute=name) for name, _ in own_tensors(module)
            ]
    return sorted(units.values(), key=lambda unit: (unit.key == OUTER, unit.key))


def _once(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tied tensors once, in the order of their first place."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _moving(module: nn.Module, residual_adapters: Collection[str]) -> frozenset[str]:
    adapters = set(getattr(module, "lora_A", ())) | set(getattr(module, "lora_embedding_A", ()))
    if adapters.isdisjoint(residual_adapters):
        return frozenset(moving_in_base(module))
    return frozenset({"weight", *moving_in_base(module)})


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
            sizes[block[0]] = sizes.get(block[0], 0) + sum(
                fsdp1.whole_shape(tensor).numel() for tensor in tensors
            )
    largest = max(sizes, key=lambda path: sizes[path], default=None)
    return {path: "layer" if path == largest else path.replace(".", "-") for path in sizes}


def _unit_key(block: Block | None, stacks: dict[str, str]) -> str:
    return OUTER if block is None else f"{stacks[block[0]]}-{block[1]:05d}"
