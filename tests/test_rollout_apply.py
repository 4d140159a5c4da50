"""An apply is a transaction: the new version, or the old one, or no answer at all; never a mixture."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
from rollout_world import World
from safetensors.numpy import save_file
from tiny_exchange import CHANGED, UNCHANGED, make_base

from weightferry.rollout_server.stager import Stager
from weightferry.shared.errors import ApplyError
from weightferry.shared.exchange import Exchange
from weightferry.shared.store import LocalStore
from weightferry.shared.tensor_files import TensorSpec


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_server_without_an_exchange_serves_the_base_and_finds_it_later(world):
    world.look()
    world.check_serves(0)
    assert world.state.problem is None
    number = world.publish(1)
    world.look()
    world.check_serves(number)


def test_steps_are_in_the_one_right_order_and_counts_balance(world):
    number = world.publish(1)
    world.look()
    assert world.engine.events == ["pause", "reload", "reset", f"label {number}", "resume"]
    assert world.engine.answered_number_at_resume == number
    (applied,) = world.state.applied
    assert (applied.tensors_applied, applied.tensors_unchanged) == (len(CHANGED), len(UNCHANGED))
    assert applied.tensors_applied + applied.tensors_unchanged == len(world.checkpoint.slots)


def test_the_newest_version_goes_first_and_older_ones_are_skipped(world):
    world.publish(1)
    world.publish(2)
    newest = world.publish(3)
    world.look()
    world.check_serves(newest)
    assert [entry.number for entry in world.state.applied] == [newest]


def test_only_what_differs_is_loaded_closed_under_fusion(world):
    same = np.random.default_rng(5).random((8, 4), dtype=np.float32)
    world.publish(1, values={CHANGED[0]: same})
    world.look()
    number = world.publish(2, values={CHANGED[0]: same})  # only k_proj differs, but it is fused with q_proj
    world.look()
    world.check_serves(number)
    assert world.state.applied[-1].tensors_applied == 2


def test_an_equal_version_is_applied_without_loading_anything(world):
    values = {name: np.ones((8, 4), dtype=np.float32) for name in CHANGED}
    world.publish(1, values=values)
    world.look()
    number = world.publish(2, values=values)
    world.look()
    world.check_serves(number)
    assert world.state.applied[-1].tensors_applied == 0


def test_a_failure_half_way_brings_the_previous_version_back_before_anybody_is_let_in(world):
    good = world.publish(1)
    world.look()
    world.engine.events.clear()
    world.engine.failures = [ApplyError("rank 1 could not load it: no memory")]
    bad = world.publish(2)
    world.look()
    world.check_serves(good)
    assert world.engine.events == ["pause", "reload", "reload", "reset", f"label {good}", "resume"]
    assert world.state.refused[bad].reason == "rank 1 could not load it: no memory"


def test_a_failed_version_is_tried_again_after_a_while_and_not_before(world):
    world.engine.failures = [ApplyError("no memory")]
    number = world.publish(1)
    world.look()
    world.now_s = 1.9
    world.look()
    world.check_serves(0)
    assert world.engine.events.count("pause") == 1
    world.now_s = 2.0
    world.look()  # the failure has passed
    world.check_serves(number)
    assert number not in world.state.refused


def test_a_version_that_keeps_failing_is_tried_a_bounded_number_of_times(world):
    world.engine.failures = [ApplyError("no"), None] * 10
    bad = world.publish(1)
    for now_s in (0, 2, 12, 62, 1e3, 1e6):  # the first try, three more, and no more
        world.now_s = now_s
        world.look()
    world.check_serves(0)
    refusal = world.state.refused[bad].to_json()
    assert world.state.problem is None
    assert refusal == {
        "number": bad,
        "kind": "apply_failed",
        "reason": "no",
        "tries": 4,
        "is_final": True,
    }
    assert world.engine.events.count("pause") == 4
    world.publish(2)  # fails too, and gives the first no further try
    world.look()
    assert world.state.refused[bad].tries == 4
    world.engine.failures = []
    good = world.publish(3)
    world.look()
    world.check_serves(good)


def test_a_bad_newest_version_does_not_hold_up_a_good_older_one(world):
    good = world.publish(1)
    bad = world.publish(2)
    (world.directory(bad) / "layer-00000.safetensors").unlink()
    world.look()
    world.check_serves(good)
    assert "is missing" in world.state.refused[bad].reason


def test_an_engine_that_lost_a_tensor_without_a_word_is_noticed(world):
    world.engine.num_lost = 1
    number = world.publish(1)
    world.look()
    assert world.state.state == "unhealthy"  # it loses one of the old version, too
    assert "2 tensors expected, 1 loaded" in world.state.refused[number].reason


def test_an_engine_that_loaded_more_than_it_was_given_is_noticed(world):
    world.engine.num_lost = -1
    number = world.publish(1)
    world.look()
    assert world.state.state == "unhealthy"
    assert "2 tensors expected, 3 loaded" in world.state.refused[number].reason


def test_an_error_in_a_check_is_a_refusal_like_any_other(world, monkeypatch):
    good = world.publish(1)
    world.look()

    def fail(*_arguments: object) -> None:
        raise KeyError("tensors")

    monkeypatch.setattr("weightferry.rollout_server.merged_source.weight_set", fail)
    bad = world.publish(2)
    world.look()
    world.check_serves(good)
    assert world.state.refused[bad].reason == "KeyError('tensors')"


def test_an_error_that_nobody_foresaw_is_a_refusal_like_any_other(world):
    good = world.publish(1)
    bad = world.publish(2)
    world.engine.failures = [KeyError("weight_loader")]
    world.look()
    world.check_serves(good)
    assert "weight_loader" in world.state.refused[bad].reason


def test_if_the_previous_version_cannot_be_restored_nothing_answers(world):
    world.publish(1)
    world.engine.failures = [ApplyError("cut"), ApplyError("cut again")]
    world.look()
    assert world.state.state == "unhealthy"
    assert "could not be restored" in world.state.unhealthy_reason
    assert "resume" not in world.engine.events
    world.look()
    assert world.state.state == "unhealthy"


EMBEDDINGS = "model.embed_tokens.weight"


def flip_in_base(world: World) -> None:
    slot, file = world.checkpoint.slots[EMBEDDINGS], world.base_dir / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[slot.begin] ^= 1
    file.write_bytes(data)


def replace_base(world: World) -> None:
    """By a checkpoint that has the same bytes under another shape."""
    tensors = {
        name: np.frombuffer(world.checkpoint.read_bytes(name), dtype=np.float32)
        for name in world.checkpoint.slots
    }
    save_file(tensors, world.base_dir / "model.safetensors")


@pytest.mark.parametrize("change", [flip_in_base, replace_base])
def test_a_base_that_changed_on_disk_is_not_loaded_by_a_later_version(world, change):
    ones = np.ones((8, 4), dtype=np.float32)
    first = world.publish(1, values={EMBEDDINGS: ones}, unchanged=["model.norm.weight"])
    world.look()
    second = world.publish(2)  # its embeddings are the base's
    change(world)
    world.engine.events.clear()
    world.look()
    assert world.state.active_version == first
    assert f"{EMBEDDINGS} is not what it was when the server started" in world.state.refused[second].reason
    assert world.engine.events == []
    assert [path.name for path in world.cache_dir.iterdir()] == [f"version-{first:012d}"]


@pytest.mark.parametrize("change", [flip_in_base, replace_base])
def test_a_base_that_changed_on_disk_is_never_taken_for_what_was_served(world, change):
    world.publish(1)  # none of its tensors are read from the base
    change(world)
    world.engine.failures = [ApplyError("cut")]
    world.look()
    assert world.state.state == "unhealthy"
    assert f"{EMBEDDINGS} is not what it was when the server started" in world.state.unhealthy_reason
    assert "resume" not in world.engine.events


def test_an_engine_that_does_not_resume_is_unhealthy(world):
    world.publish(1)
    world.engine.resume_failure = ApplyError("vLLM did not answer the resume within 300 s")
    world.look()
    assert world.state.state == "unhealthy"


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


WRONG_SHAPE = {CHANGED[0]: TensorSpec(name=CHANGED[0], dtype="F32", shape=(4, 8))}
WRONG_DTYPE = {CHANGED[0]: TensorSpec(name=CHANGED[0], dtype="I32", shape=(8, 4))}
SURPLUS = "model.layers.7.self_attn.q_proj.weight"
EXTRA = {SURPLUS: TensorSpec(name=SURPLUS, dtype="F32", shape=(8, 4))}
BROKEN_WHEN_WRITTEN = {
    "wrong shape": ({"specs": WRONG_SHAPE}, f"tensor {CHANGED[0]}"),
    "wrong dtype": ({"specs": WRONG_DTYPE}, f"tensor {CHANGED[0]}"),
    "extra tensor": (
        {"specs": EXTRA, "values": {SURPLUS: np.ones((8, 4), dtype=np.float32)}},
        "no such tensor",
    ),
    "missing tensor": ({"unchanged": UNCHANGED[:1]}, "no such tensor found (version)"),
    "unchanged, but not the base's": (
        {"enter": lambda entry: entry if entry.changed else replace(entry, xxh3_128="0" * 32)},
        "said to be the base's",
    ),
    "another digest": (
        {"enter": lambda entry: replace(entry, xxh3_128="0" * 32) if entry.changed else entry},
        "has other bytes",
    ),
    "another file": (
        {
            "enter": lambda entry: replace(
                entry, changed=True, file=entry.file.replace("outer.same", "layer-00000")
            )
        },
        "is not what the manifest says",
    ),
    "not finite": ({"values": {CHANGED[1]: np.full((8, 4), np.nan, dtype=np.float32)}}, "is not finite"),
}
BROKEN_AFTERWARDS = {
    "short": (lambda path: path.write_bytes(path.read_bytes()[:-4]), "wrong size in bytes"),
    "flipped": (flip, "has other bytes"),
    "missing": (lambda path: path.unlink(), "is missing"),
    "deleted": (lambda path: shutil.rmtree(path.parent), "is missing"),
}


@pytest.mark.parametrize("kind", BROKEN_WHEN_WRITTEN)
def test_an_unsound_version_is_refused_before_the_engine_is_touched(world, kind):
    damage, words = BROKEN_WHEN_WRITTEN[kind]
    good = world.publish(1)
    world.look()
    world.engine.events.clear()
    bad = world.publish(2, **damage)
    world.look()
    world.check_serves(good)
    assert world.engine.events == []
    assert words in world.state.refused[bad].reason


@pytest.mark.parametrize("name", CHANGED)
def test_every_tensor_of_a_file_is_looked_at(world, name):
    nan = world.publish(1, values={name: np.full((8, 4), np.nan, dtype=np.float32)})
    lie = world.publish(2, enter=lambda e: replace(e, xxh3_128="0" * 32) if e.name == name else e)
    world.look()
    world.check_serves(0)
    assert f"{name} is not finite" in world.state.refused[nan].reason
    assert f"{name} has other bytes" in world.state.refused[lie].reason


@pytest.mark.parametrize("kind", BROKEN_AFTERWARDS)
def test_a_damaged_version_is_refused_before_the_engine_is_touched(world, kind):
    damage, words = BROKEN_AFTERWARDS[kind]
    good = world.publish(1)
    world.look()
    world.engine.events.clear()
    bad = world.publish(2)
    damage(world.directory(bad) / "layer-00000.safetensors")
    world.look()
    world.check_serves(good)
    assert world.engine.events == []
    assert words in world.state.refused[bad].reason


def test_an_exchange_of_another_base_is_said_in_the_status_and_never_applied(world, tmp_path):
    Exchange.open(world.exchange_path, base=make_base(tmp_path / "other", seed=1))
    world.look()
    world.check_serves(0)
    assert "another base" in (world.state.problem or "")


def test_a_version_of_another_exchange_is_refused(world):
    number = world.publish(1)
    identity = world.exchange_path / "exchange.json"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"exchange_id": "another"}))
    world.look()
    world.check_serves(0)
    assert "belongs to another exchange" in world.state.refused[number].reason


def test_the_exchange_is_not_needed_after_an_apply(world):
    number = world.publish(1)
    world.look()
    expected = world.weights_of(number)
    shutil.rmtree(world.exchange_path)
    world.look()
    assert world.state.active_version == number
    assert world.engine.tensors == expected


def test_the_cache_holds_the_active_version_and_no_more(world):
    numbers = []
    for step in range(4):
        numbers.append(world.publish(step))
        world.look()
    (kept,) = world.cache_dir.iterdir()
    assert kept.name == f"version-{numbers[-1]:012d}"


def test_what_was_replaced_is_deleted_away_from_the_event_loop(world, monkeypatch):
    dropped, drop = [], Stager.drop

    def record(stager: Stager, number: int) -> None:
        dropped.append((number, threading.current_thread() is threading.main_thread()))
        drop(stager, number)

    monkeypatch.setattr(Stager, "drop", record)
    old = world.publish(1)
    world.look()
    dropped.clear()
    world.publish(2)
    world.look()
    assert (old, False) in dropped
    assert not any(is_on_the_event_loop for _, is_on_the_event_loop in dropped)


@pytest.mark.parametrize("kind", ["not finite", "extra tensor", "short", "refused by the engine"])
def test_a_refused_version_leaves_nothing_in_the_cache(world, kind):
    damage, _ = BROKEN_WHEN_WRITTEN.get(kind, ({}, ""))
    number = world.publish(1, **damage)
    if kind == "short":
        BROKEN_AFTERWARDS[kind][0](world.directory(number) / "layer-00000.safetensors")
    if kind == "refused by the engine":
        world.engine.failures = [ApplyError("no")]
    world.look()
    assert number in world.state.refused
    assert list(world.cache_dir.iterdir()) == []


def test_a_file_that_is_a_link_out_of_the_exchange_is_refused(world, tmp_path):
    number = world.publish(1)
    shard = world.directory(number) / "layer-00000.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    world.look()
    world.check_serves(0)
    assert "leads out of the exchange" in world.state.refused[number].reason


def test_a_version_is_served_although_its_lease_could_not_be_given_back(world):
    number = world.publish(1)
    readers = world.exchange_path / "readers"

    def break_readers() -> None:
        shutil.rmtree(readers)
        readers.write_text("no directory any more")

    world.engine.at_resume = break_readers
    world.look()
    world.check_serves(number)
    assert world.state.refused == {}
    assert [entry.number for entry in world.state.applied] == [number]


def test_another_exchange_in_the_same_place_is_said_and_not_followed(world):
    world.publish(1)
    number = world.publish(2)
    world.look()
    shutil.rmtree(world.exchange_path)
    world.publish(3)
    world.look()
    assert world.state.active_version == number
    assert "another exchange has taken its place, restart this server" in world.state.problem


@pytest.mark.parametrize("name", ["layer-00000.safetensors", "manifest.json"])
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting_for_its_writer(world, name):
    number = world.publish(1)
    file = world.directory(number) / name
    file.unlink()
    os.mkfifo(file)
    world.background._deadline_s = 10.0
    world.look()
    world.check_serves(0)
    assert f"{file}: is not a regular file" in world.state.refused[number].reason


def test_a_file_system_that_hangs_is_said_within_the_deadline(world, monkeypatch):
    number = world.publish(1)
    world.background._deadline_s = 0.5
    goes_on = threading.Event()
    monkeypatch.setattr(LocalStore, "open", lambda *_: goes_on.wait())
    world.look()
    world.check_serves(0)
    assert "did not end within" in world.state.refused[number].reason
    goes_on.set()  # lets the thread go


def test_what_was_staged_too_late_does_not_stay_in_the_cache(world, monkeypatch):
    number = world.publish(1)
    may_go, stage = threading.Event(), Stager.stage

    def slow(self, version, files):
        may_go.wait(30)
        return stage(self, version, files)

    monkeypatch.setattr(Stager, "stage", slow)
    world.background._deadline_s = 0.5

    async def story() -> None:
        await world.watcher.look()
        assert "staging did not end within" in world.state.refused[number].reason
        may_go.set()
        world.background._deadline_s = 60.0
        await world.background.run("what comes after", lambda: None)

    asyncio.run(story())
    assert list(world.cache_dir.iterdir()) == []


def test_storage_that_fails_never_makes_a_refusal_final(world, monkeypatch):
    """It may be the last version of a training, and the bucket be away for an hour."""
    number = world.publish(1)
    open_file = LocalStore.open

    def no_space(_self, _path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "open", no_space)
    for now_s in (0, 2, 12, 62, 312, 562):
        world.now_s = now_s
        world.look()
    refusal = world.state.refused[number].to_json()
    assert (refusal["kind"], refusal["tries"], refusal["is_final"]) == ("storage", 6, False)
    monkeypatch.setattr(LocalStore, "open", open_file)
    world.now_s = 812
    world.look()
    world.check_serves(number)


def test_an_error_after_the_switch_leaves_no_server_that_applies_for_ever(world, monkeypatch):
    number = world.publish(1)
    monkeypatch.setattr("weightferry.rollout_server.watcher.datetime", None)
    world.look()
    world.check_serves(number)


def test_no_lease_stays_behind(world):
    world.publish(1)
    world.look()
    assert list((world.exchange_path / "readers").iterdir()) == []


def test_the_status_is_json_and_says_why(world):
    number = world.publish(1)
    world.look()
    status = json.loads(json.dumps(world.state.to_json()))
    assert (status["state"], status["active_version"], status["run_id"]) == ("serving", number, "run-a")
    assert status["applied"][0]["published_to_served_s"] > 0
