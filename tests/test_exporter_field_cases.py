"""Failures that people met in public with exporters of sharded models: the cases that concern ours."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exporter_ranks import CASES, Case, base_hash, build, open_exchange, place, shard
from fsdp1_wraps import layers, leaves, only_layers, unit
from merged_ranks import IDS, SHARDINGS
from ranks import run_on_ranks
from safetensors.torch import load_file
from tiny_model import make_odd_model, make_tiny_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightferry.exporter import adapter_directory
from weightferry.exporter.model_walk import base_model
from weightferry.exporter.publisher import Publisher
from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.durable import FilePart, NewFile
from weightferry.shared.errors import BaseMismatchError, UnsupportedError
from weightferry.shared.exchange import Exchange
from weightferry.shared.manifest import Manifest

pytestmark = pytest.mark.ranks

CASE = CASES["all-linear"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("field")
    make_tiny_model(path / "tiny")
    make_tiny_model(path / "half", dtype=torch.float16)
    make_odd_model(path / "odd")
    return path


def publish(root: Any, path: Path, base: Path) -> Path:
    with Publisher(root, open_exchange(place()[0], path, base)) as publisher:
        return publisher.publish(1).wait().path


# Case 1: the writer reads late, after the weights have moved on.


def slowed(method: Callable) -> Callable:
    def wrapper(*arguments: Any) -> Any:
        time.sleep(0.05)
        return method(*arguments)

    return wrapper


def publish_slowly(directory: Path, sharding: str) -> Path:
    """Every write to disk takes 50 ms; training goes on in the moment that `publish` gives the model back."""
    root = SHARDINGS[sharding](build(CASE, directory))
    exchange = open_exchange(place()[0], directory / f"slow-{sharding}", directory / "tiny")
    with Publisher(root, exchange) as publisher:
        with (
            mock.patch.object(NewFile, "write", slowed(NewFile.write)),
            mock.patch.object(FilePart, "write_at", slowed(FilePart.write_at)),
        ):
            ticket = publisher.publish(1)
        with torch.no_grad():
            for name, parameter in root.named_parameters():
                if "lora_" in name:
                    parameter.mul_(-3)
        return ticket.wait().path


@pytest.mark.parametrize(("sharding", "world_size"), [("none", 1), ("FSDP1 leaves", 2), ("FSDP2", 2)])
def test_case_1_a_slow_writer_publishes_the_weights_of_the_moment_of_publishing(
    directory, sharding, world_size
):
    path = run_on_ranks(publish_slowly, directory, sharding, world_size=world_size)[0]
    base = load_file(directory / "tiny" / "model.safetensors")
    factors = build(CASE, directory).state_dict()
    targeted = {
        name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name in factors
        if name.endswith("base_layer.weight")
    }
    found = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == base.keys()
    for name, tensor in found.items():
        if name not in targeted:
            assert torch.equal(tensor, base[name]), name
            continue
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (factors[f"{module}.lora_{x}.default.weight"].double() for x in "AB")
        expected = (base[name].double() + 2.0 * (b @ a)).to(base[name].dtype)
        assert torch.equal(tensor, expected), name
        assert not torch.equal(tensor, base[name]), name


# Case 3: drift. Fifty publishes with changing adapters, the first state again at the end.


def publish_fifty(directory: Path, sharding: str) -> list[str]:
    case = Case(base="half", lora=CASE.lora)
    root = SHARDINGS[sharding](build(case, directory, dtype=torch.float16))
    factors = [p for n, p in root.named_parameters() if "lora_" in n]
    first = [p.detach().clone() for p in factors]
    before, digests = base_hash(root), []
    exchange = open_exchange(place()[0], directory / f"fifty-{sharding}", directory / "half")
    with Publisher(root, exchange, publish="merged") as publisher:
        for step in range(50):
            with torch.no_grad():
                for parameter, start in zip(factors, first, strict=True):
                    parameter.copy_(start * (1 if step == 49 else 1 + step / 16))
            version = publisher.publish(step).wait()
            shards = sorted(version.path.glob("layer-*.safetensors"))
            digests.append(hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest())
    assert base_hash(root) == before, "the base drifted"
    return digests


@pytest.mark.parametrize(("sharding", "world_size"), [("none", 1), ("FSDP1 leaves", 2), ("FSDP2", 2)])
def test_case_3_fifty_publishes_of_a_float16_base_leave_it_as_it_was(directory, sharding, world_size):
    for digests in run_on_ranks(publish_fifty, directory, sharding, world_size=world_size):
        assert digests[49] == digests[0]
        assert len(set(digests)) == 49


# Case 4: the names of wrappers leak.


def wrapped(model: Any, sharding: str, checkpoints: bool, compiles: bool) -> Any:
    """As people combine them: checkpoints next to the layer, the unit around, compiled outermost."""

    def inner(layer: nn.Module) -> nn.Module:
        layer = checkpoint_wrapper(layer) if checkpoints else layer
        return torch.compile(layer, backend="eager") if compiles else layer  # pyright: ignore[reportReturnType]

    if sharding == "FSDP1":
        return layers(model, inner=inner)
    stack = base_model(model).model.layers
    for number, layer in enumerate(stack):
        stack[number] = inner(layer)
    return shard(model, place()[1]) if sharding == "FSDP2" else model


def publish_wrapped(directory: Path, sharding: str) -> dict[tuple[bool, bool], Path]:
    published = {}
    for checkpoints, compiles in itertools.product((False, True), (False, True)):
        model = build(CASE, directory, dtype=torch.float32)
        root = wrapped(model, sharding, checkpoints, compiles)
        root.train()(input_ids=IDS).logits.square().mean().backward()
        path = directory / f"wrapped-{sharding}-{checkpoints}-{compiles}"
        published[checkpoints, compiles] = publish(root, path, directory / "tiny")
    return published


@pytest.mark.parametrize(("sharding", "world_size"), [("none", 1), ("FSDP1", 2), ("FSDP2", 2)])
def test_case_4_no_wrapper_shows_in_names_or_bytes(directory, tmp_path, sharding, world_size):
    published = run_on_ranks(publish_wrapped, directory, sharding, world_size=world_size)[0]
    specs = Checkpoint.open(directory / "tiny").specs
    build(CASE, directory, dtype=torch.float32).save_pretrained(str(tmp_path))
    expected = load_file(tmp_path / "adapter_model.safetensors").keys()
    for path in published.values():
        manifest = Manifest.from_bytes((path / "manifest.json").read_bytes(), "manifest")
        assert {entry.name: entry.shape for entry in manifest.tensors} == {
            n: s.shape for n, s in specs.items()
        }
        assert load_file(path / "adapter" / "adapter_model.safetensors").keys() == expected
        for file in path.rglob("*.safetensors"):
            assert file.read_bytes() == (published[False, False] / file.relative_to(path)).read_bytes()


class Meter(nn.Module):
    """A wrapper that nobody knows."""

    def __init__(self, metered: nn.Module) -> None:
        super().__init__()
        self.metered = metered

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.metered(*inputs, **options)


def test_case_4_an_unknown_wrapper_is_an_error_before_anything_is_published(directory, tmp_path):
    model = build(CASE, directory)
    base_model(model).model.layers[1] = Meter(base_model(model).model.layers[1])
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    with pytest.raises(BaseMismatchError, match=r"layers\.1\.metered\..* \(there is no such tensor\)"):
        Publisher(model, exchange)
    assert exchange.versions() == []


# Case 8: an empty adapter under FSDP.


def publish_adapters(directory: Path) -> dict[str, Path]:
    wraps: dict[str, Callable[[Any], Any]] = {
        "FSDP1": layers,
        "FSDP1 leaves": leaves,
        "FSDP1, no root": only_layers,
        "FSDP1, checkpoints": lambda model: layers(model, inner=checkpoint_wrapper),
        "FSDP2": SHARDINGS["FSDP2"],
    }
    published = {}
    for name, wrap in wraps.items():
        root = wrap(build(CASE, directory, dtype=torch.float32))
        published[name] = publish(root, directory / f"adapter-{name}", directory / "tiny") / "adapter"
    return published


def save_by_peft(directory: Path, path: Path) -> None:
    build(CASE, directory, dtype=torch.float32).save_pretrained(str(path))


def test_case_8_the_adapter_directory_is_that_of_one_process(directory, tmp_path):
    run_on_ranks(save_by_peft, directory, tmp_path, world_size=1)  # there sets have the same order
    for name, path in run_on_ranks(publish_adapters, directory, world_size=2)[0].items():
        assert {file.name for file in path.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
        for file in path.iterdir():
            assert file.read_bytes() == (tmp_path / file.name).read_bytes(), name


def publish_nothing(directory: Path, sharding: str, when: str) -> str:
    """PEFT finds no tensor, or one has shrunk to nothing: when the publisher is made, or afterwards."""
    root = SHARDINGS[sharding](build(CASE, directory, dtype=torch.float32))
    exchange = open_exchange(place()[0], directory / f"nothing-{sharding}-{when}", directory / "tiny")
    finds_none = mock.patch.object(adapter_directory, "get_peft_model_state_dict", return_value={})
    no_rows = mock.patch.object(adapter_directory, "whole_shape", return_value=torch.Size([0, 128]))
    if when != "afterwards":
        with finds_none if when == "no keys" else no_rows, pytest.raises(UnsupportedError) as caught:
            Publisher(root, exchange, publish="adapter")
        return str(caught.value)
    with Publisher(root, exchange, publish="adapter") as publisher, no_rows:
        with pytest.raises(UnsupportedError) as caught:
            publisher.publish(1)
        return str(caught.value)


@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2"])
@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("no keys", "PEFT finds no tensor of adapter 'default'"),
        ("no rows", "lora_A.weight has no elements"),
        ("afterwards", "lora_A.weight has no elements"),
    ],
)
def test_case_8_an_empty_adapter_is_an_error_and_no_version(directory, sharding, when, words):
    for said in run_on_ranks(publish_nothing, directory, sharding, when, world_size=2):
        assert words in said
    assert Exchange.open(directory / f"nothing-{sharding}-{when}").versions() == []


# Case 11: sharded is not single.


def fsdp1_with_embeddings(model: Any) -> Any:
    base_model(model).model.embed_tokens = unit(base_model(model).model.embed_tokens)
    return layers(model)


def fsdp2_with_embeddings(model: Any) -> Any:
    fully_shard(base_model(model).model.embed_tokens, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return shard(model, dist.get_world_size())


UNEVEN: dict[str, Callable[[Any], Any]] = {
    "FSDP1": layers,
    "FSDP1, embeddings wrapped": fsdp1_with_embeddings,
    "FSDP2": SHARDINGS["FSDP2"],
    "FSDP2, embeddings wrapped": fsdp2_with_embeddings,
}
ODD = Case(base="odd", lora={"r": 3, "target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]})


def publish_uneven(directory: Path) -> dict[str, Path]:
    world_size = place()[1]
    published = {}
    for name, wrap in UNEVEN.items():
        model = build(ODD, directory, dtype=torch.float32)
        root = wrap(model) if world_size > 1 else model
        published[name] = publish(root, directory / f"uneven-{world_size}-{name}", directory / "odd")
    return published


def test_case_11_any_number_of_ranks_and_any_wrapping_give_the_same_bytes(directory):
    single = run_on_ranks(publish_uneven, directory, world_size=1)[0]["FSDP1"]
    files = {path.relative_to(single) for path in single.rglob("*.safetensors")}
    for world_size in (2, 4):
        for name, path in run_on_ranks(publish_uneven, directory, world_size=world_size)[0].items():
            assert {file.relative_to(path) for file in path.rglob("*.safetensors")} == files
            for file in files:
                assert (path / file).read_bytes() == (single / file).read_bytes(), (name, world_size, file)


def publish_shardings(directory: Path) -> dict[str, Path]:
    world_size, published = place()[1], {}
    case = Case(base="tiny", lora={"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]})
    for name, wrap in SHARDINGS.items():
        if name == "none" or world_size > 1:
            root = wrap(build(case, directory, dtype=torch.float32)).eval()
            with torch.no_grad():
                root(input_ids=IDS)
            published[name] = publish(root, directory / f"{world_size}-{name}", directory / "tiny")
    return published


def test_case_11_no_kind_of_sharding_shows_in_a_version_even_after_an_evaluation(directory):
    single = run_on_ranks(publish_shardings, directory, world_size=1)[0]["none"]
    files = {path.relative_to(single) for path in single.rglob("*.safetensors")}
    for name, path in run_on_ranks(publish_shardings, directory, world_size=2)[0].items():
        assert {file.relative_to(path) for file in path.rglob("*.safetensors")} == files
        for file in files:
            assert (path / file).read_bytes() == (single / file).read_bytes(), (name, file)
