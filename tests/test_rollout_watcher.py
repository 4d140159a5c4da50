"""When the server looks, and what it asks of a version before it looks inside."""

from __future__ import annotations

import asyncio
import time

import pytest
from rollout_world import World

from weightferry.shared.errors import ApplyError, ConfigError
from weightferry.shared.signing import HmacKey

SECRET = b"0123456789abcdef0123456789abcdef"
OTHER = b"another secret of thirty-two bytes"


def test_a_file_event_brings_a_version_long_before_the_interval(tmp_path):
    world = World(tmp_path, poll_interval_s="600")
    world.publish(1)

    async def story() -> float:
        watching = asyncio.create_task(world.watcher.run())
        while world.state.active_version == 0 or world.watcher._watch is None:
            await asyncio.sleep(0.02)
        number = await asyncio.to_thread(world.publish, 2)
        published = time.monotonic()
        while world.state.active_version != number:
            await asyncio.sleep(0.02)
        watching.cancel()
        return time.monotonic() - published

    assert asyncio.run(asyncio.wait_for(story(), 60)) < 60


def test_without_events_it_looks_at_each_interval(tmp_path, monkeypatch):
    def no_events(_path, _on_change):
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr("weightferry.shared.watch.start_inotify", no_events)
    world = World(tmp_path, poll_interval_s="0.1")

    async def story() -> None:
        watching = asyncio.create_task(world.watcher.run())
        for step in (1, 2):
            number = await asyncio.to_thread(world.publish, step)
            while world.state.active_version != number:
                await asyncio.sleep(0.02)
        watching.cancel()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_pointer_that_cannot_be_read_is_asked_for_ever_more_rarely(tmp_path):
    world = World(tmp_path)
    world.publish(1)
    world.look()
    (world.exchange_path / "latest.json").write_text("{")
    for _ in range(3):
        world.look()
    assert world.watcher._num_failures == 3
    world.publish(2)  # the pointer is mended by the next commit
    world.look()
    assert world.watcher._num_failures == 0


def test_what_is_not_signed_by_the_required_key_is_refused_and_the_signed_one_stays(tmp_path):
    key_file = tmp_path / "key"
    key_file.write_bytes(SECRET)
    world = World(tmp_path / "world", require_signature=str(key_file))
    signed = world.publish(1, signing_key=HmacKey(secret=SECRET))
    world.look()
    world.check_serves(signed)
    unsigned = world.publish(2)
    world.look()
    foreign = world.publish(3, signing_key=HmacKey(secret=OTHER))
    world.look()
    world.check_serves(signed)
    assert "is not signed, and this reader requires it" in world.state.refused[unsigned].reason
    assert "is signed otherwise" in world.state.refused[foreign].reason
    last = world.publish(4, signing_key=HmacKey(secret=SECRET))
    world.look()
    world.check_serves(last)


def test_a_key_that_cannot_be_read_is_said_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"the key .*absent cannot be read"):
        World(tmp_path, require_signature=str(tmp_path / "absent"))


def test_a_server_that_finds_its_log_lost_says_so_and_keeps_answering(tmp_path):
    world = World(tmp_path)
    world.publish(1)
    for entry in (world.exchange_path / "log").iterdir():
        entry.unlink()
    world.look()
    world.check_serves(0)
    assert world.state.problem is not None
    assert "names a version beyond the last entry of the log" in world.state.problem


def test_what_is_published_while_bad_versions_are_tried_goes_before_the_older_ones_of_them(tmp_path):
    world = World(tmp_path)
    world.publish(1)
    world.publish(2)
    world.engine.failures = [ApplyError("no")]
    published = []

    async def publish_once() -> None:
        if not published:
            published.append(await asyncio.to_thread(world.publish, 3))

    world.engine.while_pausing = publish_once
    world.look()  # the second fails, and the first is not tried: there is a third by now
    world.check_serves(0)
    assert world.engine.events.count("pause") == 1
    assert world.watcher._wake.is_set()
    world.look()
    world.check_serves(published[0])


def test_more_bad_versions_than_are_remembered_are_not_tried_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("weightferry.rollout_server.state.NUM_REMEMBERED", 2)
    world = World(tmp_path, max_tries="1")
    world.engine.failures = [ApplyError("no"), None] * 20
    for step in range(1, 5):
        world.publish(step)
    world.look()
    assert world.engine.events.count("pause") == 4
    assert len(world.state.refused) == 2
    for _ in range(3):
        world.look()
    assert world.engine.events.count("pause") == 4
    world.engine.failures = []
    good = world.publish(5)
    world.look()
    world.check_serves(good)
