"""Whole tensors out of FSDP1's flat parameters, without unsharding a unit.

With `use_orig_params=True` a live parameter is a flat view of what this rank holds of it, often of nothing;
where the rest lies follows from the flat parameter's metadata. Invariants: only the live views are read, so
values have the storage dtype, never mixed precision's; every rank of a group does the same broadcasts for the
same tensor, and nothing raises before the last of them; no unit is unsharded for it, as `summon_full_params`
would (docs/decisions/006-fsdp1-pieces.md). Follows torch 2.13, fsdp/_flat_param.py and _runtime_utils.py.
Called by `collectives` and by whoever asks for a tensor's shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState, _is_fsdp_flattened
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.utils.weak import WeakTensorKeyDictionary

from ..shared.errors import UnsupportedError, WeightferryError


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a flattened tensor, on one rank of the sharding group."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPlace:
    """One parameter's own layout, and where its elements lie; the same on every rank of `group`."""

    shape: torch.Size
    stride: tuple[int, ...]
    group: dist.ProcessGroup
    device: torch.device
    pieces: tuple[Piece, ...]

    def own_piece(self) -> Piece:
        """What this rank holds; perhaps nothing."""
        rank = dist.get_rank(self.group)
        held = (piece for piece in self.pieces if piece.rank == rank)
        return next(held, Piece(rank=rank, start=0, stop=0))


# By live parameter. A place must not refer to its parameter, or neither would ever be freed.
_PLACES = WeakTensorKeyDictionary()


def place_of(tensor: torch.Tensor) -> FlatPlace | None:
    """Where a live parameter lies; None for a tensor that FSDP1 does not shard."""
    return _PLACES.get(tensor)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """A live tensor's shape in the model, however little of it is on this rank."""
    place = place_of(tensor)
    return tensor.shape if place is None else place.shape


def whole(tensor: torch.Tensor, place: FlatPlace) -> torch.Tensor:
    """The whole tensor on the unit's device; collective in the place's group."""
    flat = torch.empty(place.shape.numel(), dtype=tensor.dtype, device=place.device)
    own, held = place.own_piece(), tensor.detach().flatten()
    is_sharded = held.numel() == own.stop - own.start
    if is_sharded:
        flat[own.start : own.stop].copy_(held)
    for piece in place.pieces:
        dist.broadcast(flat[piece.start : piece.stop], group_src=piece.rank, group=place.group)
    if not is_sharded:
        raise WeightferryError(
            f"a parameter of shape {list(place.shape)} has {held.numel()} elements on this rank, "
            f"{own.stop - own.start} expected: its FSDP unit is in use; do this between training steps"
        )
    return flat.as_strided(place.shape, place.stride)


def own_part(whole: torch.Tensor, place: FlatPlace) -> torch.Tensor:
    """What this rank would hold of a whole tensor at that place, flat."""
    laid_out = torch.empty_strided(place.shape, place.stride, dtype=whole.dtype, device=whole.device)
    piece, flat = place.own_piece(), laid_out.copy_(whole).as_strided((whole.numel(),), (1,))
    return flat[piece.start : piece.stop]


def reshard(module: FullyShardedDataParallel) -> None:
    """Give one unit its sharded views back, drop its unsharded copy, and learn where its parameters lie.

    The root keeps both after an evaluation, and its next forward would use the copy again, whatever had been
    written into the views meanwhile. So does every unit that an exception in a forward has left.
    """
    handle: Any = module._handle
    if handle is None or not handle._use_orig_params:
        return
    if module.training_state == TrainingState.SUMMON_FULL_PARAMS:
        raise UnsupportedError("the model is inside FSDP1's summon_full_params; do this outside it")
    module.training_state, handle._training_state = TrainingState.IDLE, HandleTrainingState.IDLE
    if module._is_root is not None and _is_unsharded(handle):  # None: not used yet, sharded since it was made
        _reshard(module, handle, handle.uses_sharded_strategy)
    if handle.uses_sharded_strategy:
        for parameter, place in _places(handle):
            _PLACES[parameter] = place


def why_unreadable(module: FullyShardedDataParallel) -> str:
    """Why the tensors of this unit cannot be had whole, or would be wrong, with the way out; else empty."""
    handle: Any = module._handle
    if handle is None:
        return ""
    if not handle._use_orig_params:
        return "is FSDP1 with use_orig_params=False, which hides parameters; wrap with use_orig_params=True"
    if any(extension is not None for extension in handle.flat_param._param_extensions):
        return "is FSDP1 over tensor parallelism; use fully_shard (FSDP2) for both"
    replicas = getattr(module, "_inter_node_pg", None)
    if replicas is not None and replicas.size() > 1 and not handle.uses_sharded_strategy:
        return (  # FSDP1 then turns to NO_SHARD and averages gradients over the one rank alone
            "is FSDP1 with HYBRID_SHARD over groups of one rank, whose replicas drift apart; "
            "use groups of two or more, or FULL_SHARD"
        )
    return ""


def foreign_parameters(model: nn.Module) -> list[str]:
    """Names of parameters of an FSDP1 unit around this model: where they lie is not known here."""
    units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    known = {id(p) for unit in units if unit._handle for p in unit._handle.flat_param._params or ()}
    return [n for n, p in model.named_parameters() if _is_fsdp_flattened(p) and id(p) not in known]


def _is_unsharded(handle: Any) -> bool:
    if handle._skipped_use_sharded_views or not handle.uses_sharded_strategy:
        return True
    return not handle.is_sharded(handle.flat_param) or not handle.needs_unshard()


def _places(handle: Any) -> Iterator[tuple[nn.Parameter, FlatPlace]]:
    flat, offsets = handle.flat_param, handle._get_flat_param_offsets()
    starts = [start for (start, _), pads in zip(offsets, flat._is_padding_mask, strict=True) if not pads]
    layouts = zip(flat._params, flat._shapes, flat._strides, flat._contiguities, starts, strict=True)
    for parameter, shape, stride, is_contiguous, start in layouts:
        place = FlatPlace(
            shape=shape,
            stride=torch.empty(shape, device="meta").stride() if is_contiguous else stride,
            group=handle.process_group,
            device=handle.device,
            pieces=_pieces(start, start + shape.numel(), flat._sharded_size.numel()),
        )
        yield parameter, place


def _pieces(start: int, stop: int, shard: int) -> tuple[Piece, ...]:
    """[start, stop) of a flat parameter of which each rank holds `shard` elements."""
    ranks = range(start // shard, -(-stop // shard)) if stop > start else ()
    bounds = ((rank, max(start, rank * shard), min(stop, (rank + 1) * shard)) for rank in ranks)
    return tuple(Piece(rank=rank, start=low - start, stop=high - start) for rank, low, high in bounds)
