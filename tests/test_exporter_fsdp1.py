"""Publishing from FSDP1: byte for byte what one process publishes, whatever the units and the world size."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exporter_ranks import CASES, Case, build, open_exchange, place
from fsdp1_wraps import WRAPS, hybrid, layers, leaves, lost, unit
from merged_ranks import SHARDINGS, logits
from ranks import on_ranks, run_on_ranks
from tiny_model import make_odd_model, make_tiny_model, make_tiny_moe
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from weightferry.exporter import fsdp1
from weightferry.exporter.collectives import gather_all
from weightferry.exporter.fsdp1 import own_part, place_of, reshard, whole_shape
from weightferry.exporter.in_place import held_part
from weightferry.exporter.merged_context import merged_lora
from weightferry.exporter.model_walk import walk
from weightferry.exporter.publisher import Publisher
from weightferry.shared.errors import UnsupportedError

pytestmark = pytest.mark.ranks

# Layers as units want one dtype in each; leaves as units allow PEFT's float32 factors on a bfloat16 base.
BY_LAYERS = [
    "all-linear",
    "tied, rslora, patterns",
    "odd sizes",
    "experts",
    "dora",
    "head and embedding",
    "biases",
]
BY_LEAVES = ["all-linear", "odd sizes"]
ROOTS = CASES["head and embedding"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp1")
    make_tiny_model(path / "tiny")
    make_tiny_model(path / "tied", tied=True)
    make_odd_model(path / "odd")
    make_tiny_moe(path / "moe")
    make_tiny_model(path / "deep", num_layers=6)
    return path


def publish_once(root: Any, directory: Path, base: str, name: str) -> Path:
    exchange = open_exchange(place()[0], directory / name, directory / base)
    with Publisher(root, exchange, publish="both") as publisher:
        return publisher.publish(1).wait().path


def published_cases(directory: Path) -> dict[tuple[str, str], Path]:
    """Every case by layers (all of it in float32) and by leaves; in one process: unsharded."""
    world_size, published = place()[1], {}
    for kind, names, wrap in (("layers", BY_LAYERS, layers), ("leaves", BY_LEAVES, leaves)):
        for name in names:
            dtype = torch.float32 if kind == "layers" else torch.bfloat16
            model = build(CASES[name], directory, dtype=dtype)
            root = wrap(model) if world_size > 1 else model
            place_name = f"{world_size}-{kind}-{name}"
            published[kind, name] = publish_once(root, directory, CASES[name].base, place_name)
            if world_size == 1:
                model.save_pretrained(str(directory / "peft" / kind / name))
    return published


@pytest.fixture(scope="module")
def published(directory: Path) -> dict[int, dict[tuple[str, str], Path]]:
    return {world: run_on_ranks(published_cases, directory, world_size=world)[0] for world in (1, 2, 3)}


def differing_files(one: Path, other: Path) -> list[str]:
    """Files of a version, apart from its manifest, that are not the same in both."""
    names = {p.relative_to(path) for path in (one, other) for p in path.rglob("*") if p.is_file()}
    read = [{n: (p / n).read_bytes() for n in names if (p / n).exists()} for p in (one, other)]
    return sorted(str(n) for n in names if n.name != "manifest.json" and read[0].get(n) != read[1].get(n))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("kind", "name"), [("layers", name) for name in BY_LAYERS] + [("leaves", name) for name in BY_LEAVES]
)
def test_a_version_of_fsdp1_is_byte_for_byte_that_of_one_process(
    directory, published, kind, name, world_size
):
    one, other = published[1][kind, name], published[world_size][kind, name]
    assert differing_files(one, other) == []
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        expected = directory / "peft" / kind / name / file
        assert (other / "adapter" / file).read_bytes() == expected.read_bytes()


def publish_wraps(directory: Path, names: list[str]) -> dict[str, Path]:
    published = {}
    for name in names:
        model = build(CASES["all-linear"], directory, dtype=torch.float32)
        root = WRAPS[name](model) if dist.is_initialized() else model
        published[name] = publish_once(root, directory, "tiny", f"wrap-{place()[1]}-{name}")
    return published


@pytest.fixture(scope="module")
def wrapped(directory: Path) -> dict[str, Path]:
    (plain,) = run_on_ranks(publish_wraps, directory, ["layers"], world_size=1)
    return {"plain": plain["layers"]} | run_on_ranks(publish_wraps, directory, list(WRAPS), world_size=2)[0]


@pytest.mark.parametrize("name", WRAPS)
def test_no_kind_of_units_shows_in_a_version(wrapped, name):
    assert differing_files(wrapped["plain"], wrapped[name]) == []


def publish_hybrid(directory: Path) -> Path:
    root = hybrid(build(CASES["odd sizes"], directory, dtype=torch.float32), (2, 2))
    return publish_once(root, directory, "odd", "hybrid")


def test_two_sharded_replicas_give_the_same_version(directory, published):
    for version in run_on_ranks(publish_hybrid, directory, world_size=4):
        assert differing_files(published[1]["layers", "odd sizes"], version) == []


def accumulate(root: Any, between: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The gradients of two micro batches, of which only the second one is reduced over the ranks."""
    batches = (torch.tensor([[3 + dist.get_rank(), 4]]), torch.tensor([[9, 5 + dist.get_rank()]]))
    is_fsdp1 = isinstance(root, FullyShardedDataParallel)
    if not is_fsdp1:
        root.set_requires_gradient_sync(False)
    with root.no_sync() if is_fsdp1 else contextlib.nullcontext():
        root(input_ids=batches[0]).logits.square().mean().backward()
    between(root)
    if not is_fsdp1:
        root.set_requires_gradient_sync(True)
    root(input_ids=batches[1]).logits.square().mean().backward()
    grads = (p.grad for p in root.parameters() if p.grad is not None)
    return [held_part(grad).clone() for grad in grads]


@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP1 leaves", "FSDP1 SHARD_GRAD_OP", "FSDP2"])
@on_ranks(2)
def test_in_the_middle_of_accumulated_gradients_nothing_is_lost(directory, tmp_path, sharding):
    def publish(root: Any) -> None:
        publish_once(root, directory, "tiny", f"{tmp_path}/exchange")

    def merge(root: Any) -> None:
        with merged_lora(root):
            logits(root)

    wanted, *found = (
        accumulate(SHARDINGS[sharding](build(CASES["all-linear"], directory, dtype=torch.float32)), between)
        for between in (lambda _: None, publish, merge)
    )
    assert any(grad.abs().sum() > 0 for grad in wanted)
    for grads in found:
        for one, two in zip(wanted, grads, strict=True):
            assert torch.equal(one, two)


@on_ranks(2)
def test_training_goes_on_as_if_nothing_had_been_published(directory, tmp_path):
    losses = []
    for publishes in (False, True):
        root = leaves(build(CASES["all-linear"], directory, dtype=torch.float32))
        optimizer = torch.optim.AdamW([p for p in root.parameters() if p.requires_grad], lr=0.01)
        for step in range(3):
            loss = root(input_ids=torch.tensor([[3 + dist.get_rank(), 4, 5 + step]])).logits.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if publishes:
                publish_once(root, directory, "tiny", f"{tmp_path}/exchange")
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3


def publish_from_one_rank(directory: Path) -> Path:
    """FSDP1 itself turns to NO_SHARD then."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=0, world_size=1)
    root = layers(build(CASES["all-linear"], directory, dtype=torch.float32))
    return publish_once(root, directory, "tiny", "one-rank")


def test_one_rank_is_enough(directory, published):
    (version,) = run_on_ranks(publish_from_one_rank, directory, world_size=1)
    assert differing_files(published[1]["layers", "all-linear"], version) == []


def publish_after_a_lost_forward(directory: Path) -> Path:
    root = lost(SHARDINGS["FSDP2 mixed precision"](build(ROOTS, directory, dtype=torch.float32)))
    return publish_once(root, directory, "tiny", "lost-2")


def publish_roots(directory: Path) -> Path:
    return publish_once(build(ROOTS, directory, dtype=torch.float32), directory, "tiny", "lost-1")


def test_what_a_lost_forward_left_in_another_dtype_is_not_published(directory):
    """FSDP2 too: it would not reshard its root, whose factors are in the dtype of the forward."""
    (single,) = run_on_ranks(publish_roots, directory, world_size=1)
    assert (
        differing_files(single, run_on_ranks(publish_after_a_lost_forward, directory, world_size=2)[0]) == []
    )


class Meter:
    """Counts the bytes of whole tensors that are alive: a tensor keeps the array that it was made of."""

    def __init__(self, real: Callable[..., torch.Tensor]) -> None:
        self._real, self.alive, self.peak, self.total = real, 0, 0, 0

    def __call__(self, *arguments: Any) -> torch.Tensor:
        array = self._real(*arguments).numpy().copy()
        weakref.finalize(array, self._add, -array.nbytes)
        self._add(array.nbytes)
        self.peak, self.total = max(self.peak, self.alive), self.total + array.nbytes
        return torch.from_numpy(array)

    def _add(self, num_bytes: int) -> None:
        self.alive += num_bytes


@pytest.mark.parametrize("wrap", [layers, leaves, unit])
@on_ranks(2)
def test_the_whole_tensors_of_two_layers_live_at_a_time_at_most(directory, tmp_path, wrap):
    """Whatever the units are: also if the whole model is one."""
    root = wrap(
        build(Case(base="deep", lora={"target_modules": "all-linear"}), directory, dtype=torch.float32)
    )
    meter = Meter(fsdp1.whole)
    with mock.patch.object(fsdp1, "whole", meter):
        publish_once(root, directory, "deep", f"{tmp_path}/exchange")
        with merged_lora(root):
            assert meter.alive == 0
    attention, mlp = 2 * 128 * 128 + 2 * 64 * 128, 3 * 128 * 256
    factors = 4 * (3 * 256 + 2 * (128 + 64) + 128 + 3 * (128 + 256))
    assert meter.peak < 2.1 * 4 * (attention + mlp + factors)
    assert meter.total > 6 * meter.peak  # six layers, looked at, merged, and merged in place


@on_ranks(2)
def test_the_units_have_the_same_names_on_every_rank_whatever_each_holds():
    """The first rank holds all of the smaller stack and little of the larger one, which is to be "layer"."""
    stacks = {
        name: nn.ModuleList([nn.Linear(n, 4, bias=False)]) for name, n in (("encoder", 4), ("decoder", 5))
    }
    model = nn.ModuleDict(stacks)
    reshard(unit(model))
    held = [parameter.numel() for parameter in model.parameters()]
    assert held == ([16, 2] if dist.get_rank() == 0 else [0, 18])
    assert [found.key for found in walk(model)] == ["encoder-00000", "layer-00000", "outer"]


@on_ranks(2)
def test_parameters_that_lie_transposed_in_memory_are_put_together_right():
    """Flat parameters keep the order of memory, not that of indexes."""
    torch.manual_seed(0)  # the same on both ranks
    whole = [torch.randn(6, 5).t(), torch.randn(7), torch.randn(4, 3, 2).permute(2, 0, 1)]
    parameters = [nn.Parameter(tensor.clone()) for tensor in whole]
    assert not parameters[0].is_contiguous()
    reshard(unit(nn.ParameterList(parameters)))
    assert [whole_shape(parameter) for parameter in parameters] == [tensor.shape for tensor in whole]
    gathered = gather_all(parameters, keep=True)
    for parameter, tensor in zip(parameters, whole, strict=True):
        assert torch.equal(gathered[id(parameter)], tensor)
        place = place_of(parameter)
        assert place is not None
        assert torch.equal(own_part(tensor, place), parameter)


@on_ranks(2)
def test_inside_summon_full_params_nothing_is_published(directory, tmp_path):
    root = layers(build(CASES["all-linear"], directory, dtype=torch.float32))
    exchange = open_exchange(place()[0], tmp_path / "exchange", directory / "tiny")
    with Publisher(root, exchange) as publisher:
        with (
            FullyShardedDataParallel.summon_full_params(root),
            pytest.raises(UnsupportedError, match="inside FSDP1's summon_full_params; do this outside it"),
        ):
            publisher.publish(1)
        publisher.publish(2)


REFUSED = {
    "parameters are hidden": (
        lambda model: leaves(model, use_orig_params=False),
        "use_orig_params=False, which hides parameters; wrap with use_orig_params=True",
    ),
    "replicas of one rank": (
        lambda model: hybrid(model, (2, 1)),
        "HYBRID_SHARD over groups of one rank, whose replicas drift apart; use groups of two or more",
    ),
    "not the outermost": (
        lambda model: layers(model).module,
        "belongs to an FSDP1 unit around this model; give the outermost wrapped module",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_units_that_cannot_be_right_are_refused_on_every_rank(directory, tmp_path, name):
    for said in run_on_ranks(refuse, directory, tmp_path, name, world_size=2):
        assert REFUSED[name][1] in said


def refuse(directory: Path, path: Path, name: str) -> str:
    root = REFUSED[name][0](build(CASES["all-linear"], directory, dtype=torch.float32))
    exchange = open_exchange(place()[0], path / "exchange", directory / "tiny")
    with pytest.raises(UnsupportedError) as caught:
        Publisher(root, exchange)
    return str(caught.value)
