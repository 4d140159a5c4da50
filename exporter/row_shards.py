"""Which units every rank can merge for itself, row by row, and where its rows lie in the checkpoint.

FSDP2 gives each rank the rows [begin, end) of a tensor's first dimension. Rows of a merged weight need only
those rows of the base and the small factors of the adapter, wherever row i of the result depends on row i of
the weight alone; and where a checkpoint tensor is one stretch of a tensor in memory, each rank can write its
own part of it. Nothing here is collective. Called by the publisher, `version_plan` and `row_merge`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .in_place import tuner_layers
from .layer_clone import all_tensors, live_base_state, original_class
from .model_walk import Unit

# A checkpoint tensor's name, and the elements of the tensor in memory that it is: from, up to.
Block = tuple[str, int, int]
Revert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows [begin, end) of the first dimension. `is_writer`: of the ranks that hold them, this one writes."""

    local: torch.Tensor
    begin: int
    end: int
    is_writer: bool


def rows_of(tensor: torch.Tensor, rank: int) -> Rows:
    """What this rank holds of a tensor that passes `lies_in_rows`, in its storage dtype."""
    if not isinstance(tensor, DTensor):
        return Rows(local=tensor.detach(), begin=0, end=tensor.shape[0], is_writer=rank == 0)
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    replicas = [dim for dim, placement in enumerate(placements) if type(placement) is Replicate]
    with torch.no_grad():
        local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(shape):
        raise ValueError(
            f"this rank holds {list(local.shape)} of {list(tensor.shape)}, expected {list(shape)}"
        )
    begin = offset[0] if shape[0] else 0
    is_writer = all(mesh.get_local_rank(dim) == 0 for dim in replicas)
    return Rows(local=local, begin=begin, end=begin + shape[0], is_writer=is_writer)


def lies_in_rows(tensor: torch.Tensor, world_size: int) -> bool:
    """Whether all ranks together hold a tensor by whole rows, each row on one rank or as replicas."""
    if not isinstance(tensor, DTensor) or tensor.ndim == 0 or tensor.device_mesh.size() != world_size:
        return False
    kinds = [type(placement) for placement in tensor.placements]
    sharded = [placement for placement in tensor.placements if isinstance(placement, Shard)]
    return set(kinds) <= {Shard, Replicate} and len(sharded) == 1 and sharded[0].dim == 0


def merges_by_rows(unit: Unit, world_size: int) -> bool:
    """Whether every rank can merge its own rows of the unit; the same answer on every rank."""
    return all(_module_merges_by_rows(module, world_size) for _, module in unit.adapted) and all(
        plain.tensor.ndim > 0
        and (not isinstance(plain.tensor, DTensor) or lies_in_rows(plain.tensor, world_size))
        for plain in unit.plain
        if plain.is_trained
    )


def _module_merges_by_rows(module: nn.Module, world_size: int) -> bool:
    layers, base = tuner_layers(module), live_base_state(module).values()
    return (
        bool(layers)
        and all(_layer_merges_by_rows(layer) for layer in layers)
        and all(lies_in_rows(tensor, world_size) for tensor in base)
        and len({tensor.shape[0] for tensor in base}) == 1
    )


def _layer_merges_by_rows(layer: Any) -> bool:
    kind, variants = original_class(layer), getattr(layer, "lora_variant", {})
    if kind is lora.Linear:
        is_known = all(type(variant) is DoraLinearVariant for variant in variants.values())
        return is_known and not layer.fan_in_fan_out
    if kind is ParamWrapper:  # with one expert PEFT merges as if there were no experts
        return not variants and layer.get_param().ndim == 3 and layer.num_experts > 1
    return kind is lora.Embedding and not variants


def factors(unit: Unit) -> list[torch.Tensor]:
    """The adapters' own tensors, all that a rank needs beyond its rows; the same order on every rank."""
    base = {id(tensor) for _, module in unit.adapted for tensor in live_base_state(module).values()}
    own = (tensor for _, module in unit.adapted for tensor in all_tensors(module))
    return list({id(tensor): tensor for tensor in own if id(tensor) not in base}.values())


def sliced_factors(
    module: nn.Module, whole: dict[int, torch.Tensor], index: slice | torch.Tensor
) -> dict[int, torch.Tensor]:
    """The factors that merge only the rows of `index`, by id() of the live ones.

    What runs along the merged weight's rows is cut: B of a linear layer (and its bias, and DoRA's magnitude),
    A of an embedding, and both of experts, whose rows are whole experts.
    """
    cut = dict(whole)
    for layer in tuner_layers(module):
        kind = original_class(layer)
        if kind is lora.Embedding:
            cut |= {id(a): whole[id(a)][:, index] for a in layer.lora_embedding_A.values()}
        elif kind is ParamWrapper:
            for name in layer.lora_A:
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                cut[id(a)] = _cut_a(whole[id(a)], layer.num_experts, index)
                cut[id(b)] = _cut_b(whole[id(b)], layer.num_experts, index)
        else:
            modules = [*layer.lora_B.values(), *layer.lora_magnitude_vector.values()]
            cut |= {id(t): whole[id(t)][index] for inner in modules for t in inner.parameters()}
    return cut


def _cut_a(a: torch.Tensor, num_experts: int, index: slice | torch.Tensor) -> torch.Tensor:
    return a.reshape(num_experts, -1, a.shape[-1])[index].reshape(-1, a.shape[-1])


def _cut_b(b: torch.Tensor, num_experts: int, index: slice | torch.Tensor) -> torch.Tensor:
    return b.reshape(b.shape[0], -1, num_experts)[:, :, index].reshape(b.shape[0], -1)


def blocks_of(
    tensors: dict[str, torch.Tensor], reverted: dict[str, torch.Tensor], wanted: Iterable[str], revert: Revert
) -> dict[str, list[Block]]:
    """Which stretch of each wanted tensor in memory is which checkpoint tensor; empty if one is more.

    `reverted` is what `revert`, transformers' conversion, made of `tensors`.
    """
    by_address, blocks = _blocks_by_address(tensors, reverted), {}
    for name in wanted:
        size, found = tensors[name].numel(), sorted(by_address.get(name, []), key=_begin)
        if not tiles([block[1:] for block in found], size):
            found = sorted(_blocks_by_probe(name, tensors[name].shape, revert), key=_begin)
        if not tiles([block[1:] for block in found], size):
            return {}
        blocks[name] = found
    return blocks


def _begin(block: Block) -> int:
    return block[1]


def _blocks_by_address(
    tensors: dict[str, torch.Tensor], reverted: dict[str, torch.Tensor]
) -> dict[str, list[Block]]:
    """What transformers only renamed, or cut into views: their addresses say of what they are which part."""
    starts = sorted((t.data_ptr(), name) for name, t in tensors.items() if t.numel() and t.is_contiguous())
    addresses, found = [start for start, _ in starts], dict[str, list[Block]]()
    for on_disk, view in reverted.items():
        at = bisect_right(addresses, view.data_ptr()) - 1
        if at < 0 or not view.is_contiguous():
            continue
        start, name = starts[at]
        begin = (view.data_ptr() - start) // view.element_size()
        if begin + view.numel() <= tensors[name].numel():
            found.setdefault(name, []).append((on_disk, begin, begin + view.numel()))
    return found


def _blocks_by_probe(name: str, shape: torch.Size, revert: Revert) -> list[Block]:
    """What transformers copies (experts out of a fused tensor): told by numbers that stand for the weights.

    One probe holds the number of its row in every element, another that of its column. A conversion that
    does not keep rows whole and in order leaves something out here.
    """
    if len(shape) < 2:
        return []
    num_columns, num_rows = shape[-1], math.prod(shape[:-1])
    columns = torch.arange(num_columns, dtype=torch.int32)
    kept = {
        on_disk
        for on_disk, probe in revert({name: columns.expand(shape)}).items()
        if probe.shape[-1:] == columns.shape and bool((probe == columns).all())
    }
    rows = torch.arange(num_rows, dtype=torch.int32).reshape(*shape[:-1], 1).expand(shape)
    blocks = []
    for on_disk, probe in revert({name: rows}).items():
        if on_disk not in kept:
            continue
        numbers = probe.reshape(-1, num_columns)
        first = int(numbers[0, 0])
        if bool((numbers == torch.arange(first, first + len(numbers)).unsqueeze(1)).all()):
            blocks.append((on_disk, first * num_columns, (first + len(numbers)) * num_columns))
    return blocks


def tiles(spans: list[tuple[int, int]], size: int) -> bool:
    """Whether sorted spans follow each other from 0 to `size` without gap or overlap."""
    position = 0
    for begin, end in spans:
        if begin != position:
            return False
        position = end
    return position == size
