"""Folding: the server merges an adapter into its own base and holds the very bits the trainer would send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_world import World
from safetensors.torch import save
from tiny_exchange import CHANGED, UNCHANGED

from weightferry.shared.errors import IncompatibleError
from weightferry.shared.exchange import Exchange
from weightferry.shared.manifest import AdapterEntry, AdapterModule
from weightferry.shared.publication import ManifestFields
from weightferry.shared.tensor_files import TensorSlot, read_header
from weightferry.shared.writer import ExchangeWriter

MODULES = tuple(name.removesuffix(".weight") for name in CHANGED)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, apply="fold")


def factors_of(seed: int, modules: Sequence[str] = MODULES) -> dict[str, torch.Tensor]:
    """Trained factors of rank 2 for these modules, [8, 4] each."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (2, 4), "B": (8, 2)}
    return {
        f"base_model.model.{module}.lora_{kind}.weight": torch.randn(shapes[kind], generator=generator)
        for module in modules
        for kind in "AB"
    }


def expected(world: World, factors: dict[str, torch.Tensor], scaling: float = 2.0) -> dict[str, bytes]:
    """The reference merge, by docs/format.md's one line of torch."""
    weights = {name: world.checkpoint.read_bytes(name) for name in world.checkpoint.slots}
    for name, module in zip(CHANGED, MODULES, strict=True):
        w = torch.frombuffer(bytearray(weights[name]), dtype=torch.float32).reshape(8, 4)
        a, b = (factors[f"base_model.model.{module}.lora_{kind}.weight"] for kind in "AB")
        merged = (w.double() + scaling * (b.double() @ a.double())).float()
        weights[name] = merged.numpy().tobytes()
    return weights


def publish(
    world: World,
    factors: dict[str, torch.Tensor],
    merged: dict[str, bytes] | None = None,
    modules: Sequence[str] = MODULES,
    **config: Any,
) -> int:
    """A version with the adapter, and with merged weights beside it if they are given."""
    exchange = Exchange.open(world.exchange_path, base=world.base_dir)
    writer = ExchangeWriter.become(exchange, run_id="run-a")
    publication = writer.begin(1)
    if merged:
        specs = world.checkpoint.specs
        changed = [name for name in specs if merged[name] != world.checkpoint.read_bytes(name)]
        publication.write_shard("layer-00000.safetensors", [(specs[n], merged[n]) for n in changed])
        unchanged = [spec for name, spec in specs.items() if name not in changed]
        publication.link_base_shard("outer.same.safetensors", unchanged, world.checkpoint.read_bytes)
    config_bytes = json.dumps({"peft_type": "LORA", "r": 2} | config).encode()
    publication.write_file("adapter/adapter_config.json", config_bytes)
    publication.write_file("adapter/adapter_model.safetensors", save(factors))
    entry = AdapterEntry(
        dir=f"{publication.relative_dir}/adapter",
        config_sha256="",
        modules=tuple(AdapterModule(name=module, rank=2, scaling=2.0) for module in modules),
    )
    kind = "both" if merged else "adapter"
    version = publication.commit(ManifestFields(published=kind, world_size=1, adapter=entry))
    writer.close()
    return version.number


def staged_names(world: World) -> list[str]:
    return sorted(path.name for path in Path(world.cache_dir).rglob("*") if path.is_file())


def test_the_adapter_alone_travels_and_the_engine_holds_the_reference_merge(world):
    factors = factors_of(1)
    number = publish(world, factors)
    world.look()
    assert (world.state.active_version, world.state.state) == (number, "serving")
    assert world.engine.tensors == expected(world, factors)
    assert world.engine.events == ["pause", "reload", "reset", f"label {number}", "resume"]
    assert staged_names(world) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "folded.safetensors",
    ]


def test_the_next_version_is_folded_into_the_base_and_not_into_the_last_one(world):
    publish(world, factors_of(1))
    world.look()
    later = factors_of(2)
    number = publish(world, later)
    world.look()
    assert world.state.active_version == number
    assert world.engine.tensors == expected(world, later)


def test_where_the_trainer_merged_too_its_digests_must_agree(world):
    factors = factors_of(1)
    good = publish(world, factors, merged=expected(world, factors))
    world.look()
    assert world.state.active_version == good
    before = dict(world.engine.tensors)
    bad = publish(world, factors_of(2), merged=expected(world, factors_of(3)))
    world.look()
    assert world.state.active_version == good
    assert world.engine.tensors == before
    assert "when folded here" in world.state.refused[bad].reason
    assert "serve with --apply merged" in world.state.refused[bad].reason


def test_what_the_trainer_changed_beside_the_adapter_must_agree_too(world):
    factors = factors_of(1)
    more = np.ones((8, 4), dtype=np.float32).tobytes()
    number = publish(world, factors, merged=expected(world, factors) | {UNCHANGED[0]: more})
    world.look()
    assert world.state.active_version == 0
    assert f"{UNCHANGED[0]} is" in world.state.refused[number].reason
    assert "when folded here" in world.state.refused[number].reason


def test_headers_are_not_read_again_for_each_tensor(world, monkeypatch):
    """With many layers that would grow as their square."""
    read: list[Path] = []

    def counted(path: Path) -> dict[str, TensorSlot]:
        read.append(path)
        return read_header(path)

    monkeypatch.setattr("weightferry.rollout_server.worker_extension.read_header", counted)
    number = publish(world, factors_of(1))
    world.watcher._applier._source.stage(Exchange.open(world.exchange_path).version(number))
    assert [path.name for path in read] == ["adapter_model.safetensors"]  # by the check of the adapter


def test_a_base_that_was_changed_under_the_server_is_named(world):
    file = world.base_dir / "model.safetensors"
    slot = world.checkpoint.slots[CHANGED[0]]
    data = bytearray(file.read_bytes())
    data[slot.begin] ^= 1
    file.write_bytes(data)
    source = world.watcher._applier._source
    version = publish_into_known_exchange(world, factors_of(1))
    with pytest.raises(Exception, match=f"{CHANGED[0]} is not what it was when the server started"):
        source.stage(version)


def publish_into_known_exchange(world: World, factors: dict[str, torch.Tensor]):
    """As `publish`, into an exchange whose base was identified before the base was damaged."""
    slot = world.checkpoint.slots[CHANGED[0]]
    file = world.base_dir / "model.safetensors"
    damaged = file.read_bytes()
    whole = bytearray(damaged)
    whole[slot.begin] ^= 1
    file.write_bytes(whole)
    number = publish(world, factors)
    file.write_bytes(damaged)
    return Exchange.open(world.exchange_path).version(number)


def test_a_merge_that_is_not_finite_is_refused_before_any_pause(world):
    factors = {name: tensor * 1e25 for name, tensor in factors_of(1).items()}
    number = publish(world, factors)
    world.look()
    assert world.state.active_version == 0
    assert "is not finite: the training diverged" in world.state.refused[number].reason
    assert "pause" not in world.engine.events
    assert staged_names(world) == []


TIED: list[dict[str, Any]] = [
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
]


@pytest.mark.parametrize("config", TIED)
@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_either_of_two_tied_matrices_is_refused(world, config, name):
    source = world.watcher._applier._source
    source._base = replace(world.checkpoint, config=config)
    with pytest.raises(IncompatibleError, match=f"{name}, which the base ties"):
        source._refuse_tied((AdapterModule(name=name, rank=2, scaling=1.0),))


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_are_folded_unless_they_are_tied(world, is_tied):
    source = world.watcher._applier._source
    source._base = replace(world.checkpoint, config={"tie_word_embeddings": is_tied})
    modules = ["model.embed_tokens"]
    number = publish(world, factors_of(1, modules), modules=modules)
    world.look()
    assert world.state.active_version == (0 if is_tied else number)
    assert not is_tied or "which the base ties" in world.state.refused[number].reason


@pytest.mark.parametrize("key", ["use_dora", "modules_to_save", "target_parameters", "fan_in_fan_out"])
def test_what_is_more_than_a_product_is_refused_with_the_way_out(world, key):
    number = publish(world, factors_of(1), None, **{key: ["x"]})
    world.look()
    assert world.state.active_version == 0
    assert "neither served nor folded: serve with --apply merged" in world.state.refused[number].reason


def test_a_version_without_an_adapter_is_refused_with_the_way_out(world):
    number = world.publish(1)
    world.look()
    assert "it holds no adapter" in world.state.refused[number].reason


def test_folding_agrees_with_numpy_bits_for_any_rank(world):
    """Guards the rule itself: scaling applied to the product, in float64, and rounded once."""
    factors = factors_of(4)
    publish(world, factors)
    world.look()
    for name, module in zip(CHANGED, MODULES, strict=True):
        w = np.frombuffer(world.checkpoint.read_bytes(name), dtype=np.float32).reshape(8, 4)
        a, b = (factors[f"base_model.model.{module}.lora_{k}.weight"].numpy().astype(float) for k in "AB")
        exact = (w.astype(float) + 2.0 * (b @ a)).astype(np.float32)
        assert world.engine.tensors[name] == exact.tobytes()


@pytest.mark.parametrize(("is_tied", "is_equal"), [(True, False), (True, True), (False, False)])
def test_a_merged_version_whose_tied_matrices_parted_is_refused(tmp_path, monkeypatch, is_tied, is_equal):
    """The engine would hold the one that is loaded last, for both."""
    monkeypatch.setattr("tiny_exchange.UNCHANGED", (*UNCHANGED, "lm_head.weight"))
    world: Any = World(tmp_path)
    source = world.watcher._applier._source
    source._base = replace(world.checkpoint, config={"tie_word_embeddings": is_tied})
    embeddings = np.ones((8, 4), dtype=np.float32)
    values = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings * (1 if is_equal else 2)}
    number = world.publish(1, values=values, unchanged=["model.norm.weight"])
    world.look()
    if is_tied and not is_equal:
        assert "which the base ties to one matrix" in world.state.refused[number].reason
        assert "pause" not in world.engine.events
    else:
        assert world.state.active_version == number
