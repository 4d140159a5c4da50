"""The shardings and wrappings of the matrix: how a model in training may be spread over ranks and dressed up.

Each takes the whole adapted model and returns the root that a training loop would hold. All but one keep
what torch wants of a unit: modules that PEFT trains whole are units of their own, and a parameter that
several layers share makes the whole model one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import fsdp1_wraps
import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from weightferry.exporter.model_walk import base_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """`world_size` 0: no process group at all. `is_float32`: it takes only parameters of one dtype."""

    world_size: int
    apply: Callable[[Any], Any]
    is_float32: bool = False


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's stack."""
    stacks = [m for m in base_model(model).modules() if isinstance(m, nn.ModuleList)]
    return next(s for s in stacks if "Vision" not in type(s[0]).__name__ and len(s) == 2)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def fsdp2(model: Any, *shape: int, layers: Iterable[nn.Module] | None = None, **options: Any) -> nn.Module:
    """Units: what PEFT trains whole, the decoder's layers, the rest."""
    mesh = mesh_of(*shape or (dist.get_world_size(),))
    units = list(layers_of(model) if layers is None else layers)
    if shares_parameters(list(layers_of(model))):
        units = []
    whole: list[Any] = [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    if shares_parameters(whole):
        whole = [whole]
    for unit in [*whole, *units, model]:
        fully_shard(unit, mesh=mesh, **options)
    return model


def shares_parameters(units: Sequence[nn.Module]) -> bool:
    owners = [parameter for unit in units for parameter in set(unit.parameters())]
    return len(owners) != len(set(owners))


def nested(model: Any) -> nn.Module:
    """A unit for every adapted module inside its layer's."""
    stack = layers_of(model)
    leaves = [m for layer in stack for m in layer.modules() if isinstance(m, BaseTunerLayer)]
    outermost = [m for m in leaves if not any(m is not n and m in set(n.modules()) for n in leaves)]
    if not shares_parameters(outermost):
        for module in outermost:
            fully_shard(module, mesh=mesh_of(dist.get_world_size()))
    return fsdp2(model)


def gathered(model: Any) -> nn.Module:
    """As between two forwards without resharding: whole parameters everywhere, in the policy's dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return model


def by_layer(wrap: Callable[[nn.Module], Any]) -> Callable[[Any], nn.Module]:
    """Replace each layer, then shard."""

    def apply(model: Any) -> nn.Module:
        stack = layers_of(model)
        for number, layer in enumerate(stack):
            stack[number] = wrap(layer)
        return fsdp2(model, layers=stack)

    return apply


def compiled_in_place(model: Any) -> nn.Module:
    for layer in layers_of(model):
        layer.compile()
    return fsdp2(model)


def checkpointing(model: Any) -> nn.Module:
    base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    return fsdp2(model)


def by_columns(parameter: nn.Parameter) -> Shard:
    """torch shards other dimensions than the first only evenly."""
    fits = parameter.ndim > 1 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1 if fits else 0)


def fsdp1(model: Any, **options: Any) -> nn.Module:
    """A unit a layer, and the root for the rest."""
    if shares_parameters(list(layers_of(model))):
        return fsdp1_wraps.unit(model)
    return fsdp1_wraps.layers(model, **options)


def fsdp1_of(world_size: int, apply: Callable[[Any], Any] = fsdp1) -> Sharding:
    return Sharding(world_size=world_size, apply=apply, is_float32=True)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SHARDINGS: dict[str, Sharding] = {
    "unsharded": Sharding(world_size=0, apply=lambda m: m),
    "compiled": Sharding(world_size=0, apply=lambda m: torch.compile(m)),
    "FSDP2 x1": Sharding(world_size=1, apply=fsdp2),
    "FSDP2 x2": Sharding(world_size=2, apply=fsdp2),
    "FSDP2 x3": Sharding(world_size=3, apply=fsdp2),
    "FSDP2 x4": Sharding(world_size=4, apply=fsdp2),
    "HSDP 1x2": Sharding(world_size=2, apply=lambda m: fsdp2(m, 1, 2)),
    "HSDP 2x1": Sharding(world_size=2, apply=lambda m: fsdp2(m, 2, 1)),
    "HSDP 2x2": Sharding(world_size=4, apply=lambda m: fsdp2(m, 2, 2)),
    "mixed precision": Sharding(world_size=2, apply=lambda m: gathered(fsdp2(m, mp_policy=BF16))),
    "no reshard": Sharding(world_size=2, apply=lambda m: gathered(fsdp2(m, reshard_after_forward=False))),
    "CPU offload": Sharding(
        world_size=2, apply=lambda m: fsdp2(m, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    "columns": Sharding(world_size=2, apply=lambda m: fsdp2(m, shard_placement_fn=by_columns)),
    "one unit": Sharding(world_size=2, apply=lambda m: fsdp2(m, layers=())),
    "root-managed layer": Sharding(world_size=2, apply=lambda m: fsdp2(m, layers=[layers_of(m)[0]])),
    "nested units": Sharding(world_size=2, apply=nested),
    "CheckpointWrapper": Sharding(world_size=2, apply=by_layer(checkpoint_wrapper)),
    "HF checkpointing": Sharding(world_size=2, apply=checkpointing),
    "layer.compile()": Sharding(world_size=2, apply=compiled_in_place),
    "compiled layers": Sharding(world_size=2, apply=by_layer(lambda layer: torch.compile(layer))),
    "FSDP2, compiled": Sharding(world_size=2, apply=lambda m: torch.compile(fsdp2(m))),
    "FSDP1 x2": fsdp1_of(2),
    "FSDP1 x3": fsdp1_of(3),
    "FSDP1, one unit": fsdp1_of(2, fsdp1_wraps.unit),
    "FSDP1, mixed precision": fsdp1_of(2, lambda m: fsdp1(m, mixed_precision=fsdp1_wraps.HALF)),
    "FSDP1, CheckpointWrapper": fsdp1_of(2, lambda m: fsdp1(m, inner=checkpoint_wrapper)),
    "FSDP1, HYBRID_SHARD": fsdp1_of(2, lambda m: fsdp1_wraps.hybrid(m, (1, 2))),
    "FSDP1, compiled": fsdp1_of(2, lambda m: torch.compile(fsdp1(m))),
    "DDP x2": Sharding(world_size=2, apply=DistributedDataParallel),
}
