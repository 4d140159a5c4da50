"""The ways in which people wrap a PEFT model with FSDP1, for tests on ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from weightferry.exporter.model_walk import base_model

HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def unit(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """One FSDP1 unit without an accelerator."""
    settings: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")} | options
    return FullyShardedDataParallel(module, **settings)


def only_layers(
    model: nn.Module, *, inner: Callable[[nn.Module], Any] = lambda layer: layer, **options: Any
) -> Any:
    """A unit a decoder layer; frozen and trained parameters share a flat one."""
    stack = next(m for m in base_model(model).modules() if isinstance(m, nn.ModuleList))
    for number, layer in enumerate(stack):
        stack[number] = unit(inner(layer), **options)
    return model


def layers(model: nn.Module, **options: Any) -> Any:
    """A unit a decoder layer, and the root for the rest."""
    inner = options.pop("inner", lambda layer: layer)
    return unit(only_layers(model, inner=inner, **options), **options)


def leaves(model: nn.Module, **options: Any) -> Any:
    """As training libraries do for LoRA: a unit for every trained leaf, one around each layer, the root."""
    stack = {id(m) for parent in model.modules() if isinstance(parent, nn.ModuleList) for m in parent}

    def is_unit(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        is_leaf = next(module.children(), None) is None
        return id(module) in stack or bool(is_leaf and weight is not None and weight.requires_grad)

    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_unit)
    return unit(model, auto_wrap_policy=policy, **options)


def below_peft(model: nn.Module) -> Any:
    """Only the base is a unit; what PEFT put around it is not."""
    tuner: Any = model.base_model
    tuner.model = unit(tuner.model)
    return model


def base_layers(model: nn.Module) -> Any:
    """Units below the adapters: each adapted weight is one, inside its layer's."""
    for module in list(model.modules()):
        if isinstance(inner := module._modules.get("base_layer"), nn.Linear):
            module.base_layer = unit(inner)
    return layers(model)


def hybrid(model: nn.Module, shape: tuple[int, int]) -> Any:
    """(replicas, ranks that shard one replica)."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return layers(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def used(root: Any, *, trains: bool) -> Any:
    """After a forward the root's unit stays unsharded, in the compute dtype."""
    root.train(trains)
    with torch.enable_grad() if trains else torch.no_grad():
        logits = root(input_ids=torch.tensor([[3, 4, 5]])).logits
    if trains:
        logits.float().square().mean().backward()
    return root


def lost(root: Any) -> Any:
    """After an exception in the middle of a forward: FSDP takes some of its units for still in use."""

    def lose(*_: Any) -> None:
        raise KeyError("lost")

    stack = next(m for m in base_model(root).modules() if isinstance(m, nn.ModuleList))
    hook = stack[1].register_forward_pre_hook(lose)
    with contextlib.suppress(KeyError):
        root.train()(input_ids=torch.tensor([[3, 4, 5]]))
    hook.remove()
    return root


STRATEGY = ShardingStrategy
WRAPS: dict[str, Callable[[Any], Any]] = {
    "layers": layers,
    "leaves": leaves,
    "one unit": unit,
    "the base as a unit": below_peft,
    "no unit around the layers": only_layers,
    "base layers": base_layers,
    "SHARD_GRAD_OP, evaluated": lambda m: used(
        layers(m, sharding_strategy=STRATEGY.SHARD_GRAD_OP), trains=False
    ),
    "SHARD_GRAD_OP, trained": lambda m: used(
        layers(m, sharding_strategy=STRATEGY.SHARD_GRAD_OP), trains=True
    ),
    "NO_SHARD, evaluated": lambda m: used(layers(m, sharding_strategy=STRATEGY.NO_SHARD), trains=False),
    "HYBRID_SHARD": lambda m: hybrid(m, (1, dist.get_world_size())),
    "mixed precision, evaluated": lambda m: used(layers(m, mixed_precision=HALF), trains=False),
    "mixed precision, trained": lambda m: used(layers(m, mixed_precision=HALF), trains=True),
    "NO_SHARD in mixed precision, trained": lambda m: used(
        layers(m, sharding_strategy=STRATEGY.NO_SHARD, mixed_precision=HALF), trains=True
    ),
    "checkpoint wrappers inside": lambda m: layers(m, inner=checkpoint_wrapper),
    "lost in a forward": lambda m: lost(layers(m, mixed_precision=HALF)),
    "SHARD_GRAD_OP, lost in a forward": lambda m: lost(
        layers(m, sharding_strategy=STRATEGY.SHARD_GRAD_OP, mixed_precision=HALF)
    ),
    "compiled": lambda m: torch.compile(layers(m), backend="eager"),
}
