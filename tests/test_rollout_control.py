"""The operator steers: roll back, pin, pause updates; only with the token, and never into a mixture."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rollout_world import World

from weightferry.rollout_server.control import Control
from weightferry.rollout_server.settings import ServerSettings
from weightferry.rollout_server.version_header import VersionHeader
from weightferry.shared.errors import ApplyError, ConfigError, VersionNotFoundError
from weightferry.shared.exchange import Exchange
from weightferry.shared.retention import Pruner, RetentionPolicy

TOKEN = "a-long-secret"
POSTS = ("rollback", "pin", "unpin", "pause-updates", "resume-updates")


@pytest.fixture
def three(tmp_path):
    """A world that serves the third of three versions."""
    world = World(tmp_path)
    for step in (1, 2, 3):
        world.publish(step)
        world.look()
    return world


def app_of(world: World, token: str | None = TOKEN) -> FastAPI:
    app = FastAPI()
    app.state.weightferry = world.state
    app.add_middleware(VersionHeader)
    control = Control(world.state, token)
    control.steer(world.watcher)
    control.attach(app)
    return app


def ask(app: FastAPI, method: str, name: str, body: Any = None, token: str | None = TOKEN) -> httpx.Response:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, f"/weightferry/{name}", json=body, headers=headers)

    return asyncio.run(send())


def roll_back(world: World, number: int) -> None:
    asyncio.run(world.watcher.roll_back(number))


def forget_all_but_the_newest(world: World) -> None:
    exchange = Exchange.open(world.exchange_path)
    Pruner(exchange, RetentionPolicy(keep=1), grace_s=0.0).give_up()


def test_a_rollback_serves_the_older_version_and_stays_there_whatever_is_published(three):
    oldest = three.published[0]
    roll_back(three, oldest)
    three.check_serves(oldest)
    newest = three.publish(4)
    three.look()
    three.check_serves(oldest)
    assert (three.state.newest_version, three.state.pinned_version) == (newest, oldest)
    three.watcher.unpin()
    three.look()
    three.check_serves(newest)


def test_a_rollback_is_a_transaction_like_every_apply(three):
    three.engine.failures = [ApplyError("no")]
    _, second, third = three.published
    with pytest.raises(ApplyError, match=f"version {second} was not applied: no"):
        roll_back(three, second)
    three.check_serves(third)
    assert three.state.pinned_version is None
    newest = three.publish(4)
    three.look()
    three.check_serves(newest)


def test_a_version_that_retention_has_passed_cannot_be_rolled_back_to(three):
    forget_all_but_the_newest(three)
    three.engine.events.clear()
    with pytest.raises(VersionNotFoundError, match="retention has passed it"):
        roll_back(three, three.published[0])
    three.check_serves(three.published[2])
    assert (three.engine.events, three.state.pinned_version) == ([], None)


def test_a_version_that_is_refused_for_good_cannot_be_rolled_back_to(tmp_path):
    world = World(tmp_path, max_tries="1")
    bad = world.publish(1)
    (world.directory(bad) / "layer-00000.safetensors").write_bytes(b"")
    world.look()
    good = world.publish(2)
    world.look()
    world.engine.events.clear()
    with pytest.raises(ApplyError, match=f"version {bad} is refused for good"):
        roll_back(world, bad)
    world.check_serves(good)
    assert (world.engine.events, world.state.pinned_version) == ([], None)


def test_a_rollback_that_waited_for_an_apply_does_not_revive_a_server_that_it_left_unhealthy(three):
    """The engine holds a mixture then, and a rollback would load only what differs from the last good one."""
    oldest = three.published[0]
    three.publish(4)
    three.engine.failures = [ApplyError("cut"), ApplyError("cut again")]

    async def story() -> None:
        looking = asyncio.create_task(three.watcher.look())
        while three.state.state != "applying":
            await asyncio.sleep(0)
        with pytest.raises(ApplyError, match=r"the server is unhealthy: apply failed \(cut\)"):
            await three.watcher.roll_back(oldest)
        await looking

    asyncio.run(asyncio.wait_for(story(), 60))
    assert three.state.state == "unhealthy"
    assert three.state.active_version != oldest


def test_a_pin_holds_what_is_active_until_it_is_taken_back(three):
    asyncio.run(three.watcher.pin())
    newer = three.publish(4)
    three.look()
    three.check_serves(three.published[2])
    three.watcher.unpin()
    three.look()
    three.check_serves(newer)


def test_paused_updates_are_made_up_for_when_they_are_resumed(three):
    asyncio.run(three.watcher.pause_updates())
    three.publish(4)
    newest = three.publish(5)
    three.look()
    three.check_serves(three.published[2])
    assert three.state.newest_version == newest
    three.watcher.resume_updates()
    three.look()
    three.check_serves(newest)


def test_a_retry_waits_while_updates_are_held(tmp_path):
    world = World(tmp_path)
    world.engine.failures = [ApplyError("no")]
    number = world.publish(1)
    world.look()
    asyncio.run(world.watcher.pause_updates())
    world.now_s = 1e6
    world.look()
    world.check_serves(0)
    world.watcher.resume_updates()
    world.look()
    world.check_serves(number)


def test_pausing_updates_waits_for_the_apply_under_way(three):
    number = three.publish(4)

    async def story() -> None:
        looking = asyncio.create_task(three.watcher.look())
        while three.state.state != "applying":
            await asyncio.sleep(0)
        await three.watcher.pause_updates()
        three.check_serves(number)
        await looking

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("configured", [TOKEN, None])
@pytest.mark.parametrize("given", [None, "", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_without_the_token_no_control_route_answers(three, name, configured, given):
    before = three.state.to_json()
    response = ask(app_of(three, configured), "POST", name, {"number": 1}, token=given)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert three.state.to_json() == before


@pytest.mark.parametrize("name", POSTS)
def test_a_server_that_has_no_token_is_closed_to_all(three, name):
    response = ask(app_of(three, None), "POST", name, {"number": 1}, token="None")
    assert response.status_code == 401
    assert "start the server with --token-file" in response.json()["message"]


def test_over_http_a_rollback_says_what_is_active_whether_it_succeeds_or_not(three):
    oldest, second, third = three.published
    app, weights = app_of(three), three.weights_of(oldest)
    done = ask(app, "POST", "rollback", {"number": oldest})
    assert done.status_code == 200
    assert (done.json()["active_version"], done.json()["pinned_version"]) == (oldest, oldest)
    assert done.headers["x-weightferry-version"] == str(oldest)
    forget_all_but_the_newest(three)
    gone = ask(app, "POST", "rollback", {"number": second})
    assert gone.status_code == 404
    assert (gone.json()["active_version"], gone.json()["pinned_version"]) == (oldest, oldest)
    three.engine.failures = [ApplyError("no")]
    refused = ask(app, "POST", "rollback", {"number": third})
    assert refused.status_code == 409
    assert f"version {third} was not applied: no" in refused.json()["message"]
    assert refused.json()["active_version"] == oldest
    assert three.engine.tensors == weights


@pytest.mark.parametrize(
    "body", [None, [], {}, {"number": "1"}, {"number": -1}, {"number": True}, {"number": 1.0}]
)
def test_a_body_that_names_no_version_is_400_and_changes_nothing(three, body):
    response = ask(app_of(three), "POST", "rollback", body)
    assert response.status_code == 400
    three.check_serves(three.published[2])
    assert three.state.pinned_version is None


def test_a_server_that_turns_unhealthy_in_a_rollback_says_so(three):
    three.engine.failures = [ApplyError("no"), ApplyError("never")]
    response = ask(app_of(three), "POST", "rollback", {"number": three.published[0]})
    assert response.status_code == 503
    assert "could not be restored: never" in response.text


def test_the_versions_are_listed_with_what_the_server_makes_of_them(three):
    app = app_of(three)
    bad = three.publish(4)
    (three.directory(bad) / "layer-00000.safetensors").write_bytes(b"")
    three.look()
    roll_back(three, three.published[1])
    value = ask(app, "GET", "versions", token=None).json()
    rows = {row["number"]: row for row in value["versions"]}
    assert list(rows) == three.published
    assert [n for n, row in rows.items() if row["is_active"]] == [three.published[1]]
    assert [n for n, row in rows.items() if row["is_pinned"]] == [three.published[1]]
    assert [n for n, row in rows.items() if row["refused"]] == [bad]
    forget_all_but_the_newest(three)
    value = ask(app, "GET", "versions", token=None).json()
    assert [row["number"] for row in value["versions"]] == [bad]
    assert value["active_version"] == three.published[1]


def test_a_server_without_an_exchange_lists_nothing(tmp_path):
    world = World(tmp_path)
    assert ask(app_of(world), "GET", "versions", token=None).json()["versions"] == []
    assert ask(app_of(world), "POST", "rollback", {"number": 1}).status_code == 404


def test_the_token_comes_from_a_file_or_the_environment_and_is_never_printed(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")

    def settings(**given: str) -> ServerSettings:
        variables = {f"WEIGHTFERRY_{name.upper()}": value for name, value in given.items()}
        return ServerSettings.from_environment({"WEIGHTFERRY_EXCHANGE": "/x"} | variables)

    assert settings().control_token is None
    assert settings(token=TOKEN).control_token == TOKEN
    assert settings(token_file=str(file)).control_token == TOKEN
    assert TOKEN not in repr(settings(token=TOKEN))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        _ = settings(token_file=str(file)).control_token
    with pytest.raises(ConfigError, match="cannot be read"):
        _ = settings(token_file=str(tmp_path / "absent")).control_token
    with pytest.raises(ConfigError, match="both set"):
        _ = settings(token_file=str(file), token=TOKEN).control_token


def test_the_status_says_what_holds_updates(three):
    asyncio.run(three.watcher.pin())
    asyncio.run(three.watcher.pause_updates())
    status = json.loads(json.dumps(three.state.to_json()))
    assert (status["pinned_version"], status["are_updates_paused"]) == (three.published[2], True)
