"""Prometheus is told: the truth at each scrape; each apply and refusal once, of a closed set of kinds."""

from __future__ import annotations

import asyncio
import json
import re
import shutil

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rollout_world import World
from tiny_exchange import CHANGED

from weightferry.rollout_server.metrics import Metrics
from weightferry.rollout_server.refusals import RefusalKind, kind_of
from weightferry.rollout_server.state import STATES, ServerState
from weightferry.shared import errors
from weightferry.shared.errors import ApplyError

SHARD = "layer-00000.safetensors"


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, max_tries="2")


def value(world: World, name: str, **labels: str) -> float | None:
    return world.registry.get_sample_value(f"weightferry_{name}", labels)


def refusals(world: World) -> dict[str, float]:
    counts = {str(kind): value(world, "refusals_total", kind=kind) for kind in RefusalKind}
    return {kind: count for kind, count in counts.items() if count}


def test_an_apply_is_counted_once_with_its_seconds_and_bytes(world):
    number = world.publish(1)
    world.look()
    world.look()
    (applied,) = world.state.applied
    assert (value(world, "active_version"), value(world, "newest_version")) == (number, number)
    assert value(world, "applies_total") == 1
    assert value(world, "applied_bytes_total") == applied.bytes_applied
    assert value(world, "fetched_bytes_total") == (world.directory(number) / SHARD).stat().st_size
    for phase, seconds in {
        "stage": applied.stage_s,
        "pause": applied.pause_s,
        "total": applied.total_s,
    }.items():
        assert value(world, "apply_seconds_count", phase=phase) == 1
        assert value(world, "apply_seconds_sum", phase=phase) == seconds
    assert value(world, "publish_to_served_seconds_sum") == applied.published_to_served_s
    assert refusals(world) == {}


def test_a_way_back_is_an_apply_but_says_nothing_about_arrival(world):
    first = world.publish(1)
    world.look()
    world.publish(2)
    world.look()
    asyncio.run(world.watcher.roll_back(first))
    assert value(world, "applies_total") == 3
    assert value(world, "publish_to_served_seconds_count") == 2


def test_what_the_operator_holds_is_shown_and_a_pin_that_is_not_there_has_no_value(world):
    number = world.publish(1)
    world.look()
    assert (value(world, "pinned_version"), value(world, "updates_paused")) == (None, 0)
    asyncio.run(world.watcher.pin())
    asyncio.run(world.watcher.pause_updates())
    assert (value(world, "pinned_version"), value(world, "updates_paused")) == (number, 1)


def test_state_and_leases_are_those_of_the_moment_of_the_scrape(world):
    seen: list[tuple[float | None, ...]] = []

    def scrape() -> None:
        states = [value(world, "state", state=name) for name in STATES]
        seen.append((*states, value(world, "leases_held"), value(world, "healthy")))

    scrape()
    world.engine.at_resume = scrape
    world.publish(1)
    world.look()
    scrape()
    world.engine.failures = [ApplyError("cut"), ApplyError("cut again")]
    world.publish(2)
    world.look()
    scrape()
    assert seen == [(1, 0, 0, 0, 0, 1), (0, 0, 1, 0, 1, 1), (0, 1, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0)]


def test_a_look_that_failed_is_shown_until_one_succeeds(world):
    world.publish(1)
    world.look()
    pointer = world.exchange_path / "latest.json"
    whole = pointer.read_bytes()
    pointer.write_text("{")
    world.look()
    assert value(world, "exchange_problem") == 1
    pointer.write_bytes(whole)
    world.look()
    assert value(world, "exchange_problem") == 0


def break_manifest(directory):
    (directory / "manifest.json").write_text("{")


def make_unreadable(directory):
    (directory / SHARD).unlink()
    (directory / SHARD).mkdir()  # reading a directory is an error for root, too


def move_to_another_exchange(directory):
    identity = directory.parent.parent / "exchange.json"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"exchange_id": "another"}))


NAN = {"values": {CHANGED[1]: np.full((8, 4), np.nan, dtype=np.float32)}}
CASES = {
    "cut shard": ({}, lambda d: (d / SHARD).write_bytes(b""), RefusalKind.DAMAGED),
    "cut manifest": ({}, break_manifest, RefusalKind.DAMAGED),
    "no shard": ({}, lambda d: (d / SHARD).unlink(), RefusalKind.DAMAGED),
    "no directory": ({}, shutil.rmtree, RefusalKind.DAMAGED),
    "unreadable": ({}, make_unreadable, RefusalKind.STORAGE),
    "other exchange": ({}, move_to_another_exchange, RefusalKind.OTHER_BASE),
    "missing tensor": ({"unchanged": ()}, lambda _: None, RefusalKind.INCOMPATIBLE),
    "NaN": (NAN, lambda _: None, RefusalKind.DIVERGED),
}


@pytest.mark.parametrize("case", CASES)
def test_each_try_that_fails_is_counted_under_its_kind_and_the_status_names_it(world, case):
    damage, break_it, kind = CASES[case]
    number = world.publish(1, **damage)
    break_it(world.directory(number))
    world.look()
    assert refusals(world) == {kind: 1}
    world.now_s = 1e6
    world.look()
    world.look()  # refused for good: not tried, not counted
    assert refusals(world) == {kind: 2}
    assert world.state.to_json()["refused"][0]["kind"] == kind
    assert value(world, "applies_total") == 0


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (ApplyError("no memory"), RefusalKind.APPLY_FAILED),
        (KeyError("weight_loader"), RefusalKind.APPLY_FAILED),
    ],
)
def test_what_fails_in_the_engine_is_a_failed_apply_whatever_it_raised(world, failure, kind):
    world.engine.failures = [failure]
    world.publish(1)
    world.look()
    assert refusals(world) == {kind: 1}


def test_a_fault_of_our_own_is_unexpected(world, monkeypatch):
    def fail(*_arguments: object) -> None:
        raise KeyError("tensors")

    monkeypatch.setattr("weightferry.rollout_server.merged_source.weight_set", fail)
    world.publish(1)
    world.look()
    assert refusals(world) == {RefusalKind.UNEXPECTED: 1}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.SignatureError("m", "is not signed"), RefusalKind.SIGNATURE),
        (errors.IntegrityError("f", "is missing"), RefusalKind.DAMAGED),
        (errors.FormatError("not JSON"), RefusalKind.DAMAGED),
        (errors.VersionNotFoundError(3, "retention has passed it"), RefusalKind.GONE),
        (TimeoutError("the mount"), RefusalKind.STORAGE),
        (errors.SlowStorageError("staging did not end"), RefusalKind.STORAGE),
        (errors.BaseMismatchError("another base"), RefusalKind.OTHER_BASE),
        (errors.UnsupportedError("no such bucket client"), RefusalKind.INCOMPATIBLE),
        (errors.IncompatibleError("DoRA"), RefusalKind.INCOMPATIBLE),
        (errors.DivergedError("NaN"), RefusalKind.DIVERGED),
        (errors.ApplyError("rank 1"), RefusalKind.APPLY_FAILED),
        (ZeroDivisionError(), RefusalKind.UNEXPECTED),
    ],
)
def test_the_kind_follows_from_the_type_of_the_error(error, kind):
    assert kind_of(error) == kind


def test_every_metric_and_every_kind_is_there_before_anything_has_happened():
    registry = CollectorRegistry()
    Metrics(ServerState(apply="merged", exchange="x"), lambda: 0, registry)
    text = generate_latest(registry).decode()
    for kind in RefusalKind:
        assert f'weightferry_refusals_total{{kind="{kind}"}} 0.0' in text
    assert re.findall(r"^# HELP (?!weightferry_)", text, re.MULTILINE) == []
