"""What clients see: a version in every response, and no answer at all from an unhealthy server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from weightferry.rollout_server.engine import Routes
from weightferry.rollout_server.state import ServerState
from weightferry.rollout_server.version_header import VersionHeader


@pytest.fixture
def state():
    return ServerState(apply="merged", exchange="x", state="serving", active_version=41)


@pytest.fixture
def app(state):
    app = FastAPI()
    app.state.weightferry = state
    app.add_middleware(VersionHeader)
    routes = Routes({"own": "the user's own adapter"}, ("policy", "alias"))
    app.state.routes = routes

    @app.get("/plain")
    async def plain() -> dict[str, int]:
        return {"n": state.active_version}

    @app.get("/reloads")
    async def reloads() -> str:
        state.activate(42)
        return "ok"

    @app.get("/streams")
    async def streams() -> Any:
        async def body() -> AsyncIterator[str]:
            await asyncio.sleep(0.05)  # the head would be out by now
            state.activate(42)
            yield "the first token"

        return StreamingResponse(body())

    @app.get("/ask")
    async def ask(model: str) -> Any:
        # vLLM's handlers run as tasks of their own
        given = await asyncio.create_task(look_up(routes, model))
        state.activate(42)
        app.state.in_use_meanwhile = dict(state.in_use)
        return given

    @app.get("/hangs")
    async def hangs(begins: bool) -> Any:
        async def body() -> AsyncIterator[str]:
            yield "the first token"
            await asyncio.Event().wait()

        if begins:
            return StreamingResponse(body())
        return await asyncio.Event().wait()

    @app.get("/fails")
    async def fails() -> None:
        raise ValueError("boom")

    return app


async def look_up(routes: Routes, model: str) -> Any:
    """As vLLM's `_maybe_get_adapters`."""
    if model in routes:
        return routes[model]
    return None


def get(app: FastAPI, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/plain", "/nowhere"])
def test_every_response_names_its_version(app, path):
    response = get(app, path)
    assert response.headers["x-weightferry-version"] == "41"
    assert "x-weightferry-version-start" not in response.headers


def test_a_websocket_is_refused_before_the_app_sees_it(app, caplog):
    seen = []

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        seen.append(websocket)
        await websocket.accept()

    with pytest.raises(WebSocketDisconnect) as refusal, TestClient(app).websocket_connect("/v1/realtime"):
        pass
    assert refusal.value.code == 1008
    assert seen == []
    assert "refused a websocket to /v1/realtime" in caplog.text


@pytest.mark.parametrize("path", ["/reloads", "/streams"])
def test_a_request_that_saw_a_reload_before_its_first_bytes_names_both_versions(app, path):
    headers = get(app, path).headers
    assert (headers["x-weightferry-version-start"], headers["x-weightferry-version"]) == ("41", "42")


@pytest.mark.parametrize("model", ["policy", "alias", ""])  # vLLM takes a request without a model, too
def test_with_adapters_the_version_is_that_of_the_adapter_the_request_was_given(app, model):
    app.state.routes.set_version("adapter of 40", 40)
    response = get(app, f"/ask?model={model}")
    assert response.json() == "adapter of 40"
    assert response.headers["x-weightferry-version"] == "40"
    assert "x-weightferry-version-start" not in response.headers


@pytest.mark.parametrize("model", ["policy", "own"])
def test_before_the_first_adapter_and_under_other_names_the_base_is_named(app, model):
    if model == "own":
        app.state.routes.set_version("adapter of 40", 40)
    headers = get(app, f"/ask?model={model}").headers
    assert headers["x-weightferry-version"] == "0"
    assert "x-weightferry-version-start" not in headers


def test_an_adapter_is_in_use_until_its_request_has_ended(app, state):
    app.state.routes.set_version("adapter of 40", 40)
    get(app, "/ask?model=policy")
    assert app.state.in_use_meanwhile == {40: 1}
    assert state.in_use == {}


@pytest.mark.parametrize("begins", [False, True])
def test_requests_in_flight_end_without_an_answer_when_the_server_becomes_unhealthy(app, state, begins):
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def story() -> None:
        query = f"begins={begins}".encode()
        scope = {"type": "http", "method": "GET", "path": "/hangs", "query_string": query, "headers": []}
        request = asyncio.create_task(app(scope, asyncio.Event().wait, send))
        while not state.in_flight or (begins and not any(message.get("body") for message in sent)):
            await asyncio.sleep(0)
        state.give_up("version 42 could not be restored")
        ended, _ = await asyncio.wait({request}, timeout=10)
        assert ended  # nobody but the server itself ended it
        await request

    if begins:
        with pytest.raises(ConnectionAbortedError, match="could not be restored"):
            asyncio.run(story())
        assert sent[-1].get("more_body")  # the connection is cut; nothing says that the answer is whole
    else:
        asyncio.run(story())
        assert sent[0]["status"] == 503
    assert not state.in_flight


def test_an_unhealthy_server_answers_nothing_but_its_status_and_its_metrics(app, state):
    state.give_up("version 42 could not be restored")
    for path in ("/plain", "/health", "/v1/completions"):
        response = get(app, path)
        assert response.status_code == 503
        assert "could not be restored" in response.text
        assert response.headers["x-weightferry-version"] == "41"
    for path in ("/weightferry/status", "/metrics"):
        assert get(app, path).status_code == 404  # reached the app, which has none here
