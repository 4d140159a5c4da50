"""A client that asks for a version gets an answer of that version or 409, whatever is applied meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from rollout_world import World
from starlette.responses import StreamingResponse

from weightferry.rollout_server.engine import Routes
from weightferry.rollout_server.state import ServerState
from weightferry.rollout_server.version_header import VersionHeader
from weightferry.shared.errors import ApplyError

EXACT, MINIMUM = "x-weightferry-version", "x-weightferry-min-version"
AT_ARRIVAL = "x-weightferry-version-start"


def state_of(apply: str = "merged") -> ServerState:
    return ServerState(apply=apply, exchange="x", state="serving", active_version=41, newest_version=41)


@pytest.fixture
def state():
    return state_of()


@pytest.fixture
def app(state):
    return app_of(state)


def app_of(state: ServerState) -> FastAPI:
    """Its handlers note when they are reached, and when their client is said to have gone."""
    app = FastAPI()
    app.state.weightferry, app.state.events = state, []
    app.add_middleware(VersionHeader)
    app.state.routes = Routes({"own": "the user's own adapter"}, ("policy",))

    @app.get("/becomes")
    async def becomes(versions: str) -> str:
        app.state.events.append("reached")
        for number in filter(None, versions.split(",")):
            state.activate(int(number))
        return "ok"

    @app.get("/streams")
    async def streams(before: int, after: int) -> Any:
        async def body() -> AsyncIterator[str]:
            state.activate(before)
            yield "the first token"
            state.activate(after)
            yield "the second token"
            try:
                await asyncio.Event().wait()
            finally:
                app.state.events.append("stopped")

        return StreamingResponse(body())

    @app.get("/ask")
    async def ask(request: Request, model: str) -> Any:
        handler = asyncio.create_task(look_up_and_generate(app.state.routes, model))
        gone = asyncio.create_task(until_gone(request))
        await asyncio.wait({handler, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            app.state.events.append("stopped")
        handler.cancel()
        gone.cancel()

    @app.get("/weightferry/status")
    async def status() -> str:
        return "ok"

    return app


async def look_up_and_generate(routes: Routes, model: str) -> None:
    """As vLLM's `_maybe_get_adapters`, then a short while of work."""
    if model in routes:
        _ = routes[model]
    await asyncio.sleep(0.2)


async def until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def ask(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.get(path, headers={name.replace("_", "-"): v for name, v in headers.items()})


def get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    return asyncio.run(ask(app, path, **headers))


def exactly(number: object) -> dict[str, str]:
    return {EXACT: str(number)}


def at_least(number: object) -> dict[str, str]:
    return {MINIMUM: str(number)}


@pytest.mark.parametrize("wanted", [exactly(41), at_least(41), at_least(0), exactly(41) | at_least(3), {}])
def test_what_is_active_and_asked_for_answers(app, wanted):
    response = get(app, "/becomes?versions=", **wanted)
    assert (response.status_code, response.json()) == (200, "ok")


@pytest.mark.parametrize(
    ("wanted", "value", "words"),
    [
        (exactly(40), {"version": 40}, "version 40"),
        (exactly(0), {"version": 0}, "version 0"),
        (at_least(42), {"min_version": 42}, "version 42 or a newer one"),
        (
            exactly(41) | at_least(42),
            {"version": 41, "min_version": 42},
            "version 41 and version 42 or a newer one",
        ),
    ],
)
def test_what_is_not_active_is_409_that_says_what_is_and_costs_the_engine_nothing(app, wanted, value, words):
    response = get(app, "/becomes?versions=", **wanted)
    assert response.status_code == 409
    assert response.json() == {
        "message": f"{words} was asked for, version 41 would answer",
        "wanted": value,
        "state": "serving",
        "active_version": 41,
        "newest_version": 41,
        "pinned_version": None,
        "are_updates_paused": False,
    }
    assert response.headers[EXACT] == "41"
    assert app.state.events == []


@pytest.mark.parametrize("name", [EXACT, MINIMUM])
@pytest.mark.parametrize("value", ["", "-1", "+1", "1.0", "1e3", "newest", "4 1", "41, 41", "9" * 5000])
def test_what_is_no_number_of_a_version_is_400_that_says_what_was_found(app, name, value):
    response = get(app, "/becomes?versions=", **{name: value})
    assert response.status_code == 400
    assert f"the header {name} is {value[:100]!r}: expected" in response.json()["message"]
    assert app.state.events == []


@pytest.mark.parametrize(
    ("becomes", "wanted", "status"),
    [
        ("42", exactly(41), 409),
        ("42", at_least(41), 200),
        ("40", at_least(41), 409),  # a rollback
        ("42,41", exactly(41), 409),  # a part of it may be 42's
        ("40,42", at_least(41), 409),
        ("42,43", at_least(41), 200),
    ],
)
def test_an_apply_after_the_request_came_in_is_judged_too(app, becomes, wanted, status):
    response = get(app, f"/becomes?versions={becomes}", **wanted)
    assert response.status_code == status
    assert app.state.events == ["reached"]
    active = int(becomes.split(",")[-1])
    assert (response.headers[EXACT], response.headers[AT_ARRIVAL]) == (str(active), "41")
    if status == 409:
        assert (response.json()["active_version"], response.json()["state"]) == (active, "serving")
        assert f"version 41, then version {becomes.split(',')[0]}" in response.json()["message"]


def test_a_version_that_went_and_came_back_is_not_taken_for_the_only_one(app):
    headers = get(app, "/becomes?versions=42,41").headers
    assert (headers[AT_ARRIVAL], headers[EXACT]) == ("41", "41")


def test_a_stream_is_judged_by_its_first_bytes_and_its_work_ends(app):
    response = get(app, "/streams?before=42&after=42", **exactly(41))
    assert response.status_code == 409
    assert b"token" not in response.content
    assert app.state.events == ["stopped"]


def test_a_stream_that_an_apply_overtakes_is_cut_off(app):
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(MINIMUM.encode(), b"41")]
    scope = {"type": "http", "method": "GET", "path": "/streams", "headers": headers}
    scope["query_string"] = b"before=42&after=40"
    with pytest.raises(ConnectionAbortedError, match="version 42, then version 40 would answer"):
        asyncio.run(asyncio.wait_for(app(scope, asyncio.Event().wait, send), 60))
    assert [message.get("body") for message in sent] == [None, b"the first token"]
    assert sent[-1]["more_body"]  # nothing says that the answer is whole
    assert app.state.events == ["stopped"]


@pytest.mark.parametrize(
    ("model", "wanted", "status"),
    [
        ("policy", exactly(40), 200),
        ("policy", at_least(40), 200),
        ("policy", exactly(41), 409),
        ("policy", at_least(41), 409),
        ("own", exactly(0), 200),
        ("own", exactly(40), 409),
    ],
)
def test_with_adapters_the_one_that_the_request_was_given_is_judged_before_the_engine_works(
    model, wanted, status
):
    app = app_of(state_of("adapter"))
    app.state.routes.set_version("adapter of 40", 40)
    response = get(app, f"/ask?model={model}", **wanted)
    assert response.status_code == status
    assert app.state.events == ([] if status == 200 else ["stopped"])


@contextlib.asynccontextmanager
async def asking_while_replacing(app: FastAPI, **headers: str) -> AsyncIterator[asyncio.Task]:
    """A request that comes in while weights are replaced; it is not answered before the block ends."""
    state: ServerState = app.state.weightferry
    with state.replacing():
        request = asyncio.create_task(ask(app, "/becomes?versions=", **headers))
        await asyncio.sleep(0.05)
        assert not request.done()
        assert app.state.events == []
        yield request


@pytest.mark.parametrize(("wanted", "status"), [(exactly(42), 200), (at_least(42), 200), (exactly(41), 409)])
def test_while_weights_are_replaced_what_comes_out_of_it_is_judged(app, state, wanted, status):
    async def story() -> httpx.Response:
        async with asking_while_replacing(app, **wanted) as request:
            state.activate(42)
        return await request

    response = asyncio.run(asyncio.wait_for(story(), 60))
    assert response.status_code == status
    assert response.headers[EXACT] == "42"
    assert AT_ARRIVAL not in response.headers


def test_a_replacement_that_ends_in_no_answer_is_503_for_those_who_waited_for_it(app, state):
    async def story() -> httpx.Response:
        async with asking_while_replacing(app, **exactly(42)) as request:
            state.give_up("version 42 could not be restored")
        return await request

    response = asyncio.run(asyncio.wait_for(story(), 60))
    assert (response.status_code, app.state.events) == (503, [])


@pytest.mark.parametrize("wanted", [exactly(41), exactly(99), exactly("newest")])
def test_an_unhealthy_server_is_503_whatever_is_asked_for(app, state, wanted):
    state.give_up("version 42 could not be restored")
    assert get(app, "/becomes?versions=", **wanted).status_code == 503


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_for_the_version_that_is_being_applied_waits_for_its_apply(tmp_path, fails):
    world = World(tmp_path)
    world.engine.failures = [ApplyError("no")] if fails else []
    number, app = world.publish(1), app_of(world.state)

    async def story() -> httpx.Response:
        looking = asyncio.create_task(world.watcher.look())
        while world.state.state != "applying":
            await asyncio.sleep(0)
        response = await ask(app, "/becomes?versions=", **at_least(number))
        await looking
        return response

    response = asyncio.run(asyncio.wait_for(story(), 60))
    assert response.status_code == (409 if fails else 200)
    assert response.headers[EXACT] == str(0 if fails else number)


def test_the_control_routes_are_not_judged(app):
    assert get(app, "/weightferry/status", **exactly(99)).status_code == 200
