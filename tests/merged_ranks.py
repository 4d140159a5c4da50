"""What tests of merging in place run on ranks: whole states of sharded models, and the reference merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exporter_ranks import Case, build, place, shard
from fsdp1_wraps import HALF, hybrid, layers, leaves
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from weightferry.exporter.merged_context import merged_lora
from weightferry.exporter.model_walk import base_model

# Adapted weights in the layers' units and in the root's, which FSDP leaves unsharded after an evaluation.
CASE = Case(base="tiny", lora={"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]})
IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])
_BELOW = ("base_layer", "token_adapter")
State = dict[str, torch.Tensor]


def columns(parameter: nn.Parameter) -> Shard:
    """By columns, where there is an even number of them: FSDP2 wants that."""
    return Shard(1 if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else 0)


def fsdp2(
    model: Any,
    shape: tuple[int, ...] | None = None,
    *,
    inner: Callable[[nn.Module], Any] = lambda layer: layer,
    **options: Any,
) -> Any:
    """A unit a decoder layer, and the root. `shape`: (replicas, ranks that shard one replica)."""
    shape = shape or (place()[1],)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    stack = base_model(model).model.layers
    for number, layer in enumerate(stack):
        stack[number] = inner(layer)
        fully_shard(stack[number], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


SHARDINGS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "DDP": DistributedDataParallel,
    "FSDP1": layers,
    "FSDP1 leaves": leaves,
    "FSDP1 SHARD_GRAD_OP": lambda model: layers(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "FSDP1 NO_SHARD": lambda model: layers(model, sharding_strategy=ShardingStrategy.NO_SHARD),
    "FSDP1 HYBRID_SHARD": lambda model: hybrid(model, (1, place()[1])),
    "FSDP1 mixed precision": lambda model: layers(model, mixed_precision=HALF),
    "FSDP1 compiled": lambda model: torch.compile(layers(model), backend="eager"),
    "FSDP1 checkpoints": lambda model: layers(model, inner=checkpoint_wrapper),
    "FSDP2": lambda model: shard(model, place()[1]),
    "FSDP2 replicas": lambda model: fsdp2(model, (place()[1], 1)),
    "FSDP2 columns": lambda model: fsdp2(model, shard_placement_fn=columns),
    "FSDP2 offloaded": lambda model: fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "FSDP2 mixed precision": lambda model: fsdp2(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "FSDP2 kept after forward": lambda model: fsdp2(model, reshard_after_forward=False),
    "FSDP2 compiled": lambda model: fsdp2(model, inner=lambda layer: torch.compile(layer, backend="eager")),
    "FSDP2 checkpoints": lambda model: fsdp2(model, inner=checkpoint_wrapper),
    "FSDP2 one unit": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (place()[1],))),
}


def whole_state(root: nn.Module) -> State:
    """A copy of every whole tensor, through torch's own distributed state dict, by names without wrappers."""
    state: Any = get_model_state_dict(root, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def weights(state: State) -> State:
    """What acts as the base's weights, under the base's names."""
    acting: State = {}
    for name, tensor in state.items():
        if "lora_" in name or "trainable_tokens" in name:
            continue
        parts = [part for part in name.removeprefix("base_model.model.").split(".") if part not in _BELOW]
        if "original_module" in parts:
            parts.remove("original_module")
            acting.setdefault(".".join(parts), tensor)
        elif "modules_to_save" in parts:
            start = parts.index("modules_to_save")
            acting[".".join(parts[:start] + parts[start + 2 :])] = tensor
        else:
            acting[".".join(parts)] = tensor
    return acting


def adapters(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "lora_" in name or "modules_to_save" in name}


def merged_reference(exact: Any, state: State) -> Any:
    """PEFT's own merge of a whole model in that state and in float64, rounded once to the state's dtypes."""
    for tensor in [*exact.parameters(), *exact.buffers()]:
        tensor.data = tensor.data.double() if tensor.is_floating_point() else tensor.data
    exact.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    merged: Any = exact.merge_and_unload()
    dtypes = {name: tensor.dtype for name, tensor in weights(state).items()}
    for name, tensor in merged.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(dtypes.get(name, torch.float32))
    for name, buffer in merged.named_buffers():
        if name not in dtypes:  # rotary frequencies
            buffer.data = buffer.data.float()
    return merged.eval()


def logits(root: Any) -> torch.Tensor:
    with torch.no_grad():
        return root(input_ids=IDS).logits.clone()


def differing(one: State, other: State) -> list[str]:
    """Names whose tensors have other bytes, dtypes or shapes, or that only one state has."""

    def key(tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tensor.dtype, tensor.shape, raw

    return sorted(name for name in one.keys() | other.keys() if key(one.get(name)) != key(other.get(name)))


def move_adapters(root: nn.Module) -> None:
    """As a training step would."""
    with torch.no_grad():
        for name, parameter in root.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.25)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def make(directory: Path, sharding: str, case: Case = CASE) -> Any:
    """In float32, which every kind of unit takes."""
    return SHARDINGS[sharding](build(case, directory, dtype=torch.float32)).eval()


def flags(root: Any) -> list[tuple]:
    """Training modes, gradient flags and merged adapters of everything."""
    modules = [
        (name, m.training, tuple(getattr(m, "merged_adapters", ()))) for name, m in root.named_modules()
    ]
    return [*modules, *((name, p.requires_grad) for name, p in root.named_parameters())]


class Snapshot:
    """What a model is and answers, to be compared after something happened to it."""

    def __init__(self, root: Any) -> None:
        self._answers, self._state, self._flags = logits(root), whole_state(root), flags(root)

    def require_same(self, root: Any, restore: str) -> None:
        answers, state = logits(root), whole_state(root)
        if restore == "bytes":
            assert torch.equal(answers, self._answers)
            assert differing(state, self._state) == []
        else:  # float32: what is left of the rounding of one sum and one difference
            assert torch.allclose(answers, self._answers, atol=1e-4)
            assert all(torch.allclose(state[n], self._state[n], atol=1e-6) for n in state)
        assert flags(root) == self._flags
        assert not [n for m in root.modules() for n in ("merge", "set_adapter") if n in m.__dict__]


class Lost(Exception):
    """What the tests raise inside."""


def lose(*_: Any) -> None:
    raise Lost("here")


def use(root: Any, restore: str, body: Callable[[], Any]) -> None:
    with merged_lora(root, restore=restore):
        body()
