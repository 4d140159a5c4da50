"""Adapters come and go behind one name: each stays until the last request that was given it has ended."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollout_world import World
from tiny_exchange import CHANGED

from weightferry.rollout_server.engine import VllmEngine
from weightferry.rollout_server.worker_extension import WeightferryWorker
from weightferry.shared.errors import ApplyError, IncompatibleError
from weightferry.shared.exchange import Exchange
from weightferry.shared.manifest import AdapterEntry, AdapterModule
from weightferry.shared.publication import ManifestFields
from weightferry.shared.writer import ExchangeWriter


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, apply="adapter")


def publish(world: World, value: float = 1.0, alpha: int = 2) -> int:
    """A version that holds an adapter of rank 2 on one module."""
    from safetensors.numpy import save

    module = CHANGED[0].removesuffix(".weight")
    factors = {
        f"base_model.model.{module}.lora_A.weight": np.full((2, 4), value, dtype=np.float32),
        f"base_model.model.{module}.lora_B.weight": np.full((8, 2), value, dtype=np.float32),
    }
    writer = ExchangeWriter.become(Exchange.open(world.exchange_path, base=world.base_dir), run_id="run-a")
    publication = writer.begin(1)
    config = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": alpha}).encode()
    publication.write_file("adapter/adapter_config.json", config)
    publication.write_file("adapter/adapter_model.safetensors", save(factors))
    entry = AdapterEntry(
        dir=f"{publication.relative_dir}/adapter",
        config_sha256="",
        modules=(AdapterModule(name=module, rank=2, scaling=1.0),),
    )
    version = publication.commit(ManifestFields(published="adapter", world_size=1, adapter=entry))
    writer.close()
    return version.number


def loaded(world: World) -> list[int]:
    """The numbers whose adapters the engine holds, and whose directories therefore must be there."""
    assert all((path / "adapter_model.safetensors").exists() for path in world.engine.adapters.values())
    return [int(name.partition("@v")[2]) for name in world.engine.adapters]


def test_an_adapter_is_loaded_under_a_name_of_its_own_before_the_public_name_moves(world):
    number = publish(world)
    world.look()
    assert world.engine.events == ["route", f"add policy@v{number}", f"route {number}"]
    assert (world.state.active_version, world.state.state) == (number, "serving")
    (applied,) = world.state.applied
    assert (applied.tensors_applied, applied.pause_s) == (2, 0.0)


def test_the_last_three_adapters_stay_loaded_and_older_ones_go(world):
    numbers = []
    for _ in range(6):
        numbers.append(publish(world))
        world.look()
    assert loaded(world) == numbers[-3:]
    assert len(list(world.cache_dir.iterdir())) == 3


def test_an_adapter_that_a_request_uses_stays_however_old_it_is(world):
    first = publish(world)
    world.look()
    world.state.in_use[first] = 1
    numbers = []
    for _ in range(5):
        numbers.append(publish(world))
        world.look()
    assert loaded(world) == [first, *numbers[-3:]]
    world.state.in_use[first] = 0
    numbers.append(publish(world))
    world.look()
    assert loaded(world) == numbers[-3:]


def test_an_adapter_that_vllm_refuses_leaves_the_old_one_and_nothing_in_the_cache(world):
    good = publish(world)
    world.look()
    world.engine.failures = [ApplyError("load of the adapter failed on rank 0: rank 64 is greater than 16")]
    bad = publish(world)
    world.look()
    assert (world.state.active_version, world.state.state) == (good, "serving")
    assert "rank 64 is greater" in world.state.refused[bad].reason
    assert [path.name for path in world.cache_dir.iterdir()] == [f"version-{good:012d}"]


def test_an_adapter_that_is_not_finite_never_reaches_the_engine(world):
    bad = publish(world, value=np.nan)
    world.look()
    assert world.engine.events == ["route"]
    assert "is not finite" in world.state.refused[bad].reason
    assert list(world.cache_dir.iterdir()) == []


def test_an_adapter_whose_settings_were_altered_never_reaches_the_engine(world):
    bad = publish(world)
    config = world.directory(bad) / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 2', '"r": 1'))
    world.look()
    assert world.engine.events == ["route"]
    assert "adapter_config.json: has other bytes" in world.state.refused[bad].reason


def test_an_adapter_that_vllm_would_scale_otherwise_never_reaches_the_engine(world):
    bad = publish(world, alpha=3)
    world.look()
    assert world.engine.events == ["route"]
    assert "scaled by 1.0 in training, by 1.5 in adapter_config.json" in world.state.refused[bad].reason


@pytest.mark.parametrize("failure", [ApplyError("no answer within 300 s"), RuntimeError("not ours")])
def test_an_old_adapter_that_cannot_be_removed_does_not_refuse_the_new_one(world, failure):
    world.engine.remove_failure = failure
    for _ in range(5):
        publish(world)
        world.look()
    assert world.state.active_version == world.state.newest_version > 0
    assert world.state.refused == {}


class Client:
    """As much of vLLM's EngineClient as loading an adapter needs: what each rank could not bind."""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    def __init__(self, *unbound: list[str]) -> None:
        self.answers = [{"ok": True, "rank": rank, "unbound": names} for rank, names in enumerate(unbound)]
        self.called: list[str] = []

    async def collective_rpc(self, method: str, args: tuple) -> list[dict]:
        self.called.append(method)
        return self.answers


class Models:
    base_model_paths, lora_id_counter = (), SimpleNamespace(inc=lambda _step: 7)


def test_an_adapter_of_which_vllm_binds_a_part_is_refused_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "weightferry.rollout_server.engine.adapter_request", lambda *_: SimpleNamespace(lora_int_id=7)
    )
    client = Client(["a", "b"], ["b", "c"])
    with pytest.raises(IncompatibleError, match=r"no place for the adapter of b \(1 in all\)"):
        asyncio.run(VllmEngine(client, Models, 60.0).add_adapter("policy@v1", tmp_path))
    assert client.called == ["weightferry_add_adapter", "weightferry_remove_adapter"]


class AdapterWorker(WeightferryWorker):
    """As much of vLLM's worker as loading an adapter needs: layers for some of its modules."""

    rank = 0

    def __init__(self, loaded: list[str], layers: list[str]) -> None:
        adapter = SimpleNamespace(loras=dict.fromkeys(loaded))
        manager = SimpleNamespace(get_adapter=lambda _number: adapter, modules=dict.fromkeys(layers))
        self.model_runner: Any = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))

    def add_lora(self, _request: object) -> bool:
        return True


def test_a_worker_names_what_it_has_no_layer_for(monkeypatch):
    monkeypatch.setattr("weightferry.rollout_server.engine.adapter_request", lambda *_: None)
    worker = AdapterWorker(["c", "a", "b"], ["b", "d"])
    answer = worker.weightferry_add_adapter("policy@v1", 7, "/x")
    assert answer == {"ok": True, "rank": 0, "unbound": ["a", "c"]}


def test_each_stage_of_a_pipeline_may_lack_the_modules_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "weightferry.rollout_server.engine.adapter_request", lambda *_: SimpleNamespace(lora_int_id=7)
    )
    client = Client(["a"], ["b"])
    asyncio.run(VllmEngine(client, Models, 60.0).add_adapter("policy@v1", tmp_path))
    assert client.called == ["weightferry_add_adapter"]


def test_a_merged_version_is_refused_with_the_way_out(world):
    number = world.publish(1)
    world.look()
    assert "or serve with --apply merged" in world.state.refused[number].reason


def test_a_way_back_to_an_adapter_that_is_still_loaded_fetches_and_loads_nothing(world):
    first = publish(world, 1.0)
    world.look()
    publish(world, 2.0)
    world.look()
    world.engine.events.clear()
    asyncio.run(world.watcher.roll_back(first))
    assert world.engine.events == [f"route {first}"]
    assert first in loaded(world)
    assert (world.state.active_version, world.state.pinned_version) == (first, first)
    world.watcher.unpin()
    for _ in range(3):  # it counts as used last from here on
        publish(world)
    world.look()
    assert first in loaded(world)
