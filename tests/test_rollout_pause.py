"""What replacing weights does with requests: by policy they go on, end first, or are ended; none is stuck."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rollout_world import World

from weightferry.rollout_server.engine import VllmEngine
from weightferry.rollout_server.version_header import VersionHeader
from weightferry.shared.errors import ApplyError, EngineBusyError, VersionNotFoundError

VERSION, AT_ARRIVAL = "x-weightferry-version", "x-weightferry-version-start"
FOREVER = "60"


class Server:
    """A world behind HTTP: what is posted to /generate is answered when the test says so."""

    def __init__(self, world: World) -> None:
        self.world, self.may_end, self.num_reached = world, asyncio.Event(), 0
        app = self._app = FastAPI()
        app.state.weightferry = world.state
        app.add_middleware(VersionHeader)

        @app.post("/generate")
        async def generate() -> str:
            self.num_reached += 1
            await self.may_end.wait()
            return "done"

        @app.get("/health")
        async def health() -> str:
            return "ok"

        @app.post("/weightferry/rollback")
        async def roll_back(number: int) -> str:
            await world.watcher.roll_back(number)
            return "done"

    async def ask(self, method: str = "POST", path: str = "/generate") -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path)

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncIterator[asyncio.Task]:
        """One request that has reached vLLM."""
        request, before = asyncio.create_task(self.ask()), self.num_reached
        await until(lambda: self.num_reached > before)
        yield request


async def until(is_so: Any) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def run(story: Any) -> Any:
    return asyncio.run(asyncio.wait_for(story, 60))


async def begin_to_apply(world: World) -> asyncio.Task:
    looking = asyncio.create_task(world.watcher.look())
    await until(lambda: world.state.replacement_ended is not None)
    return looking


@pytest.mark.parametrize(
    ("mode", "pause"), [("keep", "pause"), ("wait", "pause wait"), ("abort", "pause abort")]
)
def test_the_engine_is_paused_by_the_policy(tmp_path, mode, pause):
    world = World(tmp_path, pause_mode=mode)
    number = world.publish(1)
    world.look()
    world.check_serves(number)
    assert world.engine.events == [pause, "reload", "reset", f"label {number}", "resume"]
    assert world.state.to_json()["pause_mode"] == mode


def test_with_wait_running_requests_end_under_their_version_and_new_ones_begin_under_the_next(tmp_path):
    world = World(tmp_path, pause_mode="wait", pause_deadline_s=FOREVER)
    number = world.publish(1)

    async def story() -> tuple[httpx.Response, httpx.Response]:
        server = Server(world)
        async with server.generating() as old:
            looking = await begin_to_apply(world)
            new = asyncio.create_task(server.ask())
            await asyncio.sleep(0.05)
            assert server.num_reached == 1
            assert (await server.ask("GET", "/health")).headers[VERSION] == "0"  # probes are answered
            assert world.engine.events == []
            server.may_end.set()
            await looking
        return await old, await new

    old, new = run(story())
    world.check_serves(number)
    for response, version in ((old, 0), (new, number)):
        assert response.status_code == 200
        assert response.headers[VERSION] == str(version)
        assert AT_ARRIVAL not in response.headers


def test_with_keep_nothing_is_waited_for(tmp_path):
    world = World(tmp_path)
    number = world.publish(1)

    async def story() -> httpx.Response:
        server = Server(world)
        async with server.generating() as request:
            await world.watcher.look()
            assert not request.done()
            server.may_end.set()
        return await request

    headers = run(story()).headers
    assert (headers[AT_ARRIVAL], headers[VERSION]) == ("0", str(number))


def test_with_abort_new_requests_begin_under_the_next_version(tmp_path):
    world = World(tmp_path, pause_mode="abort")
    number = world.publish(1)

    async def story() -> httpx.Response:
        server = Server(world)
        server.may_end.set()
        asked: list[asyncio.Task] = []

        async def ask_while_pausing() -> None:
            asked.append(asyncio.create_task(server.ask()))
            await asyncio.sleep(0.05)
            assert server.num_reached == 0

        world.engine.while_pausing = ask_while_pausing
        await world.watcher.look()
        return await asked[0]

    headers = run(story()).headers
    assert (headers[VERSION], AT_ARRIVAL in headers) == (str(number), False)


def test_a_wait_past_its_deadline_is_given_up_and_tried_again_while_the_old_version_answers(tmp_path):
    world = World(tmp_path, pause_mode="wait", pause_deadline_s="0.05")
    number = world.publish(1)

    async def story() -> httpx.Response:
        server = Server(world)
        async with server.generating() as long:
            looking = await begin_to_apply(world)
            waiting = asyncio.create_task(server.ask())
            await looking
            assert world.engine.events == ["resume"]
            world.check_serves(0)
            await until(lambda: server.num_reached == 2)  # who waited for the new version gets the old one
            assert not long.done()
            server.may_end.set()
            await long
        return await waiting

    assert run(story()).headers[VERSION] == "0"
    refusal = world.state.refused[number].to_json()
    assert (refusal["kind"], refusal["is_final"]) == ("busy", False)
    assert "1 requests did not end within 0 s: wait for the next try" in refusal["reason"]
    world.now_s = 2.0
    world.look()
    world.check_serves(number)
    assert world.state.refused == {}


def test_a_busy_engine_never_makes_a_refusal_final_and_other_failures_still_do(tmp_path):
    world = World(tmp_path, max_tries="2")
    number = world.publish(1)
    world.engine.pause_failure = EngineBusyError("busy")
    for tries, now_s in enumerate((0, 2, 12, 22, 32), start=1):  # ten seconds apart at most
        world.now_s = now_s
        world.look()
        refusal = world.state.refused[number]
        assert (refusal.tries, refusal.retry_at) == (tries, now_s + (2 if tries == 1 else 10))
    assert world.engine.events == ["pause", "resume"] * 5
    world.engine.pause_failure = None
    world.engine.failures = [ApplyError("no"), None] * 2
    for now_s in (42, 52):
        world.now_s = now_s
        world.look()
    assert world.state.refused[number].to_json()["is_final"]
    world.check_serves(0)


def test_a_pause_that_fails_is_resumed_without_a_load_or_the_server_is_unhealthy(tmp_path):
    world = World(tmp_path)
    number = world.publish(1)
    world.engine.pause_failure = ValueError("no such mode")
    world.look()
    world.check_serves(0)
    assert world.engine.events == ["pause", "resume"]
    assert world.state.refused[number].to_json()["kind"] == "apply_failed"
    world.engine.resume_failure = RuntimeError("gone")
    world.now_s = 2.0
    world.look()
    assert world.state.unhealthy_reason == "vLLM did not resume: gone"


def test_a_rollback_over_http_does_not_wait_for_itself(tmp_path):
    world = World(tmp_path, pause_mode="wait", pause_deadline_s=FOREVER)
    first = world.publish(1)
    world.look()
    world.publish(2)
    world.look()

    async def story() -> httpx.Response:
        return await Server(world).ask("POST", f"/weightferry/rollback?number={first}")

    assert run(story()).status_code == 200
    world.check_serves(first)
    with pytest.raises(VersionNotFoundError):
        run(world.watcher.roll_back(99))


class Client:
    """As much of vLLM's EngineClient as a pause needs; it stands still after so many seconds."""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    def __init__(self, seconds: float) -> None:
        self.seconds, self.given = seconds, None

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.given = (mode, clear_cache)
        await asyncio.sleep(self.seconds)


class Models:
    base_model_paths = ()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_vllm_is_given_the_mode_and_no_more_time_than_it_may_take(mode):
    client = Client(0.0)
    run(VllmEngine(client, Models, 60.0).pause(mode, 60.0))
    assert client.given == (mode, True)  # what is cached of the old weights must not be used again
    with pytest.raises(EngineBusyError, match=rf"did not pause \(mode {mode}\) within 0 s"):
        run(VllmEngine(Client(60.0), Models, 60.0).pause(mode, 0.01))
