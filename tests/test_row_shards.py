"""Where a tensor in memory stands in the checkpoint: what ranks may write by rows, and what not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import KasaConfig
from ranks import run_on_ranks
from tiny_exchange import CHANGED, make_base, writing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers.pytorch_utils import Conv1D

from weightferry.exporter.model_walk import walk
from weightferry.exporter.row_shards import blocks_of, merges_by_rows, tiles
from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.errors import IntegrityError
from weightferry.shared.exchange import Exchange

WEIGHT = torch.arange(24.0).reshape(4, 6)
EXPERTS = torch.arange(48.0).reshape(2, 6, 4)


def blocks(tensor: torch.Tensor, convert) -> dict:
    def revert(tensors):
        return {name: value for whole in tensors.values() for name, value in convert(whole).items()}

    return blocks_of({"memory": tensor}, revert({"memory": tensor}), ["memory"], revert)


def split_experts(fused: torch.Tensor) -> dict[str, torch.Tensor]:
    """As transformers splits gate and up of each expert: by copies."""
    gate, up = fused.chunk(2, dim=1)
    parts = {}
    for expert in range(len(fused)):
        parts[f"{expert}.gate"] = gate[expert].clone()
        parts[f"{expert}.up"] = up[expert].clone()
    return parts


def test_a_renamed_tensor_is_one_block():
    assert blocks(WEIGHT, lambda whole: {"disk": whole}) == {"memory": [("disk", 0, 24)]}


def test_a_tensor_cut_into_views_is_as_many_blocks():
    found = blocks(WEIGHT, lambda whole: {"late": whole[1:], "early": whole[:1]})
    assert found == {"memory": [("early", 0, 6), ("late", 6, 24)]}


def test_experts_that_are_copied_out_are_blocks_too():
    assert blocks(EXPERTS, split_experts) == {
        "memory": [("0.gate", 0, 12), ("0.up", 12, 24), ("1.gate", 24, 36), ("1.up", 36, 48)]
    }


@pytest.mark.parametrize(
    "convert",
    [
        lambda whole: {"disk": whole.T.contiguous()},
        lambda whole: {"disk": whole.flip(0)},
        lambda whole: {"disk": whole[:, [1, 0, *range(2, whole.shape[1])]]},
        lambda whole: {"left": whole[:, :3].clone(), "right": whole[:, 3:].clone()},
        lambda whole: {"disk": whole[1:]},
        lambda whole: {"disk": whole.clone(), "again": whole.clone()},
        lambda whole: {"disk": whole * 2},
        lambda _: {},
    ],
    ids=["transposed", "rows turned", "columns swapped", "cut across", "partly", "twice", "changed", "gone"],
)
def test_what_is_more_than_renamed_or_cut_by_rows_is_none(convert):
    assert blocks(WEIGHT, convert) == {}


def test_a_vector_that_is_copied_is_none():
    assert blocks(torch.arange(4.0), lambda whole: {"disk": whole.clone()}) == {}


class Experts(torch.nn.Module):
    """Experts of one fused weight, and what else somebody may keep beside it."""

    def __init__(self, shared: int | None = None) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(4, 8, 8))
        if shared is not None:
            self.scale = torch.nn.Parameter(torch.zeros(shared))


class Block(torch.nn.Module):
    """One layer of modules of several kinds, none of which PEFT knows by its model."""

    def __init__(self, **modules: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict(modules)])


LORA: dict[str, Any] = {"r": 2, "lora_alpha": 4}
# What is adapted, how, over which dimension of the weights it is sharded; and whether that goes by rows.
KINDS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any], int, bool]] = {
    "linear": (lambda: torch.nn.Linear(8, 8), {}, 0, True),
    "dora": (lambda: torch.nn.Linear(8, 8), {"use_dora": True}, 0, True),
    "embedding": (lambda: torch.nn.Embedding(8, 8), {}, 0, True),
    "experts": (Experts, {"target_parameters": ["it.fused"]}, 0, True),
    "linear by columns": (lambda: torch.nn.Linear(8, 8, bias=False), {}, 1, False),
    "square Conv1D": (lambda: Conv1D(8, 8), {"fan_in_fan_out": True}, 0, False),
    "dora of an embedding": (lambda: torch.nn.Embedding(8, 8), {"use_dora": True}, 0, False),
    "KaSA": (lambda: torch.nn.Linear(8, 8), {"kasa_config": KasaConfig()}, 0, False),
    "experts with a tensor of another length": (
        lambda: Experts(8),
        {"target_parameters": ["it.fused"]},
        0,
        False,
    ),
    "modules to save": (lambda: torch.nn.Linear(8, 8), {"modules_to_save": ["it"]}, 0, False),
}


def which_go_by_rows() -> dict[str, bool]:
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name, (make, settings, dim, _) in KINDS.items():
        module = Block(it=make(), other=torch.nn.Linear(8, 8))
        targets = "other" if {"target_parameters", "modules_to_save"} & settings.keys() else "it"
        model = get_peft_model(module, LoraConfig(target_modules=[targets], **LORA | settings))
        dims = {parameter: Shard(min(dim, parameter.ndim - 1)) for parameter in model.parameters()}
        fully_shard(model, mesh=mesh, shard_placement_fn=dims.get)
        units = walk(cast(torch.nn.Module, model.base_model.model))
        found[name] = all(merges_by_rows(unit, 2) for unit in units)
    return found


@pytest.mark.ranks
def test_what_goes_by_rows(tmp_path):
    for found in run_on_ranks(which_go_by_rows, world_size=2):
        assert found == {name: expected for name, (*_, expected) in KINDS.items()}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_spans_tile_if_and_only_if_nothing_is_missing_or_twice(sizes, data):
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    spans = list(zip([0, *ends], ends, strict=False))
    assert tiles(spans, ends[-1])
    dropped = data.draw(st.integers(0, len(spans) - 1))
    assert not tiles(spans[:dropped] + spans[dropped + 1 :], ends[-1])
    assert not tiles(sorted([*spans, spans[dropped]]), ends[-1])


def test_a_joint_shard_that_was_cut_is_not_entered(tmp_path):
    exchange = Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))
    specs = [Checkpoint.open(tmp_path / "base").specs[name] for name in CHANGED]
    with writing(exchange) as writer:
        publication = writer.begin(1)
        publication.begin_joint_shard("layer.safetensors", specs)
        path = publication.dir / "layer.safetensors"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(IntegrityError, match="was cut while it was written"):
            publication.enter_joint_shard("layer.safetensors", specs)
