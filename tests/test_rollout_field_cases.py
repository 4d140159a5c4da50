"""Failures that people met in public with systems of this kind, as far as the server answers for them.

Case 2 (stale prefix cache) is shown on real engines in test_reload_exact.py, case 15 (open control) in
test_control_surface.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from rollout_world import World
from safetensors.numpy import load_file, save_file
from tiny_exchange import CHANGED, UNCHANGED, publish

from weightferry.rollout_server.refusals import RefusalKind
from weightferry.rollout_server.serve import add_arguments, run
from weightferry.shared.checkpoint import INDEX_NAME, Checkpoint
from weightferry.shared.errors import ApplyError, BaseCheckpointError
from weightferry.shared.exchange import Exchange, Version
from weightferry.shared.kill_points import VARIABLE
from weightferry.shared.publication import ManifestFields
from weightferry.shared.store import LocalStore
from weightferry.shared.writer import ExchangeWriter

INTERVAL_S, SLACK_S = 0.3, 1.0
WRITER_PROCESS = Path(__file__).with_name("tiny_exchange.py")


def exchange_of(world: World) -> Exchange:
    return Exchange.open(world.url, base=world.base_dir)


def weights_of_step(world: World, step: int) -> dict[str, bytes]:
    """What `tiny_exchange.publish` writes at a step, also when retention has taken it since."""
    random = np.random.default_rng(1000 + step)
    changed = {name: random.random((8, 4), dtype=np.float32).tobytes() for name in CHANGED}
    return {name: world.checkpoint.read_bytes(name) for name in UNCHANGED} | changed


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def test_case_2_the_prefix_cache_is_cleared_before_any_request_is_let_in(tmp_path):
    """After the load, before the label and the resume; also on the way back."""
    world = World(tmp_path)
    first = world.publish(1)
    world.look()
    world.engine.failures = [ApplyError("cut")]
    world.publish(2)
    world.look()
    loads = ["pause", "reload", "reset", f"label {first}", "resume"]
    assert world.engine.events == [*loads, "pause", "reload", *loads[1:]]


def test_case_5_retention_deletes_beside_a_slow_server_which_serves_whole_versions(tmp_path, monkeypatch):
    """keep 1 and no grace, a server that takes half a second to read a shard, versions 200 ms apart."""
    world = World(tmp_path, poll_interval_s="0.05")
    writer = ExchangeWriter.become(exchange_of(world), run_id="run-a", keep=1, grace_s=0)
    step_of: dict[int, int] = {}
    real_open = LocalStore.open

    def open_slowly(store: LocalStore, path: str):
        if threading.current_thread().name == "weightferry-files":
            time.sleep(0.5)
        return real_open(store, path)

    monkeypatch.setattr(LocalStore, "open", open_slowly)
    served: list[int] = []

    def check_what_answers() -> None:
        served.append(world.state.active_version)
        assert world.engine.tensors == weights_of_step(world, step_of[served[-1]])

    world.engine.at_resume = check_what_answers

    def publish_many() -> None:
        for step in range(1, 9):
            step_of[publish(writer, step).number] = step
            time.sleep(0.2)

    async def story() -> None:
        watching = asyncio.create_task(world.watcher.run())
        await asyncio.to_thread(publish_many)
        await until(lambda: world.state.active_version == max(step_of))
        watching.cancel()

    asyncio.run(asyncio.wait_for(story(), 60))
    writer.close()
    assert served == sorted(served)
    assert 1 < len(served) < len(step_of)  # it was too slow for all, and skipped some
    assert {refusal.kind for refusal in world.state.refused.values()} <= {RefusalKind.GONE}
    assert world.state.problem is None


def test_case_5_a_directory_deleted_by_hand_between_two_shards_leaves_the_old_version(tmp_path, monkeypatch):
    world = World(tmp_path)
    good = world.publish(1)
    world.look()
    bad = publish_shards(world, [CHANGED[:1], CHANGED[1:]])
    opened: list[str] = []
    real_open = LocalStore.open

    def open_and_delete_the_rest(store: LocalStore, path: str):
        if path.endswith(".safetensors"):
            opened.append(path)
            if len(opened) == 2:
                shutil.rmtree(bad.path)
        return real_open(store, path)

    monkeypatch.setattr(LocalStore, "open", open_and_delete_the_rest)
    world.look()
    assert len(opened) == 2
    world.check_serves(good)
    assert world.state.refused[bad.number].kind == RefusalKind.DAMAGED
    newer = world.publish(3)
    world.look()
    world.check_serves(newer)


class SilentObserver:
    """Stands for watchdog's, and never emits."""

    def __init__(self, _path: Path, _on_change: Callable[[], None]) -> None: ...

    def is_alive(self) -> bool:
        return True

    def stop(self) -> None: ...


@pytest.mark.parametrize("place", ["an observer that never emits", "a bucket"])
def test_case_6_without_file_events_a_version_is_served_within_the_interval(
    tmp_path, monkeypatch, caplog, place
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("weightferry.shared.watch.start_inotify", SilentObserver)
    fsspec.filesystem("memory").store.clear()
    url = "memory://bucket/case-6" if place == "a bucket" else None
    world = World(tmp_path, url=url, poll_interval_s=str(INTERVAL_S))
    committed: dict[int, float] = {}

    def publish_one(step: int) -> int:
        number = publish(writer, step).number
        committed[number] = time.monotonic()
        return number

    async def story() -> None:
        watching = asyncio.create_task(world.watcher.run())
        for step in (1, 2, 3):
            number = await asyncio.to_thread(publish_one, step)
            await until(lambda number=number: world.state.active_version == number)
            assert time.monotonic() - committed[number] < INTERVAL_S + SLACK_S
        watching.cancel()

    writer = ExchangeWriter.become(exchange_of(world), run_id="run-a")
    asyncio.run(asyncio.wait_for(story(), 60))
    writer.close()
    assert ("a bucket has no file events" if url else "sooner at file events") in caplog.text
    assert "latest.json: read every 0.3 s" in caplog.text


KILLED_AT = (
    "after-begin",
    "after-shard:1",
    "before-manifest",
    "after-manifest",
    "before-commit",
    "after-commit",
)


def test_case_7_whatever_a_killed_trainer_leaves_the_server_stays_on_the_last_good_version(tmp_path):
    world = World(tmp_path)
    good = world.publish(1)
    world.look()
    for step, point in enumerate(KILLED_AT, 2):
        command = [sys.executable, WRITER_PROCESS, world.exchange_path, world.base_dir, str(step)]
        done = subprocess.run(command, env=os.environ | {VARIABLE: point}, timeout=60, check=False)
        assert done.returncode == -9
        world.look()
        world.check_serves(good)
        assert (world.state.refused, world.state.problem) == ({}, None)
    newer = world.publish(9)
    world.look()
    world.check_serves(newer)


def test_case_7_directories_made_by_hand_are_not_served(tmp_path):
    world = World(tmp_path)
    good = world.publish(1)
    world.look()
    world.engine.events.clear()
    versions = world.exchange_path / "versions"
    (versions / "step00000002-e0001-aaaaaa").mkdir()
    for lost in ("layer-00000.safetensors", "manifest.json", "none"):
        copy = shutil.copytree(world.directory(good), versions / f"step00000003-e0001-{lost[:6]}")
        (copy / lost).unlink(missing_ok=True)
    world.look()
    world.check_serves(good)
    assert (world.engine.events, world.state.refused, world.state.problem) == ([], {}, None)


def publish_shards(world: World, shards: list[tuple[str, ...]], lost: str = "") -> Version:
    """A version of ones in these shards; the tensor `lost` is written, and not entered in the manifest."""
    writer = ExchangeWriter.become(exchange_of(world), run_id="run-a")
    publication = writer.begin(2)
    ones = np.ones((8, 4), dtype=np.float32).tobytes()
    for number, names in enumerate(shards):
        shard = [(world.checkpoint.specs[name], ones) for name in names]
        publication.write_shard(f"layer-{number:05d}.safetensors", shard)
    shared = [spec for name, spec in world.checkpoint.specs.items() if all(name not in s for s in shards)]
    publication.link_base_shard("outer.same.safetensors", shared, world.checkpoint.read_bytes)
    publication.tensors[:] = [entry for entry in publication.tensors if entry.name != lost]
    version = publication.commit(ManifestFields(published="merged", world_size=1))
    writer.close()
    return version


def test_case_12_a_version_whose_shard_is_missing_is_refused_by_the_file_s_name(tmp_path):
    world = World(tmp_path)
    number = world.publish(1)
    (world.directory(number) / "layer-00000.safetensors").unlink()
    world.look()
    world.check_serves(0)
    assert "layer-00000.safetensors: is missing" in world.state.refused[number].reason


def test_case_12_a_shard_that_lacks_a_listed_tensor_is_refused_by_its_name(tmp_path):
    world = World(tmp_path)

    def misplace(entry):
        return replace(entry, changed=True, file=entry.file.replace("outer.same", "layer-00000"))

    number = world.publish(1, enter=misplace)
    world.look()
    world.check_serves(0)
    reason = world.state.refused[number].reason
    assert "layer-00000.safetensors" in reason
    assert "is not what the manifest says" in reason


def test_case_12_a_shard_that_holds_an_unlisted_tensor_is_refused_by_the_tensor_s_name(tmp_path):
    world = World(tmp_path)
    version = publish_shards(world, [CHANGED], lost=CHANGED[1])
    world.look()
    world.check_serves(0)
    assert CHANGED[1] in world.state.refused[version.number].reason


def test_case_12_an_old_shard_and_a_wrong_index_beside_a_version_s_own_files_are_not_looked_at(tmp_path):
    """The manifest alone says what a version is; `weightferry verify` names them."""
    world = World(tmp_path)
    number = world.publish(1)
    weights = world.weights_of(number)
    directory = world.directory(number)
    shutil.copy(world.base_dir / "model.safetensors", directory / "layer-00001.safetensors")
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {"another": "layer-00001.safetensors"}}))
    world.look()
    assert (world.state.active_version, world.engine.tensors) == (number, weights)


def lose_shard(_index: dict[str, str], base: Path) -> str:
    (base / "b.safetensors").unlink()
    return "b.safetensors: is missing"


def list_more(index: dict[str, str], _base: Path) -> str:
    index["model.layers.9.weight"] = "a.safetensors"
    return f"{INDEX_NAME}: disagrees with the shards about model.layers.9.weight"


def list_less(index: dict[str, str], _base: Path) -> str:
    del index[UNCHANGED[1]]
    return f"{INDEX_NAME}: disagrees with the shards about {UNCHANGED[1]}"


def list_an_old_shard(index: dict[str, str], base: Path) -> str:
    shutil.copy(base / "a.safetensors", base / "c.safetensors")
    index["model.layers.9.weight"] = "c.safetensors"
    return "c.safetensors: holds "


@pytest.mark.parametrize("damage", [lose_shard, list_more, list_less, list_an_old_shard])
def test_case_12_a_base_whose_index_and_shards_disagree_is_refused_at_start(tmp_path, damage):
    world = World(tmp_path)
    base = split_in_two(world.checkpoint)
    index = json.loads((base / INDEX_NAME).read_text())["weight_map"]
    words = damage(index, base)
    (base / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args([str(base), "--exchange", world.url])
    with pytest.raises(BaseCheckpointError, match=words.replace(".", r"\.")):
        run(arguments)


def split_in_two(checkpoint: Checkpoint) -> Path:
    """The base anew: its first tensors in one shard, the last ones in another."""
    tensors = load_file(checkpoint.path / "model.safetensors")
    names = {"a.safetensors": CHANGED, "b.safetensors": UNCHANGED}
    for file, held in names.items():
        save_file({name: tensors[name] for name in held}, checkpoint.path / file)
    index = {name: file for file, held in names.items() for name in held}
    (checkpoint.path / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    (checkpoint.path / "model.safetensors").unlink()
    return checkpoint.path
