"""What clients see: a version in every response, and no answer at all from an unhealthy server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

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
    routes = Routes({})
    routes.set_version("policy", "adapter of 40", 40)

    @app.get("/plain")
    async def plain() -> dict[str, int]:
        return {"n": state.active_version}

    @app.get("/reloads")
    async def reloads() -> str:
        state.active_version = 42
        return "ok"

    @app.get("/adapter")
    async def adapter() -> Any:
        # vLLM's handlers run as tasks of their own
        return await asyncio.create_task(look_up(routes))

    @app.get("/fails")
    async def fails() -> None:
        raise ValueError("boom")

    return app


async def look_up(routes: Routes) -> Any:
    return routes["policy"]


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


def test_a_request_that_saw_a_reload_names_both_versions(app):
    headers = get(app, "/reloads").headers
    assert (headers["x-weightferry-version-start"], headers["x-weightferry-version"]) == ("41", "42")


def test_with_adapters_the_version_is_that_of_the_adapter_the_request_was_given(app):
    headers = get(app, "/adapter").headers
    assert headers["x-weightferry-version"] == "40"
    assert "x-weightferry-version-start" not in headers


def test_an_unhealthy_server_answers_nothing_but_its_status(app, state):
    state.state, state.why = "unhealthy", "version 42 could not be restored"
    for path in ("/plain", "/health", "/v1/completions"):
        response = get(app, path)
        assert response.status_code == 503
        assert "could not be restored" in response.text
        assert response.headers["x-weightferry-version"] == "41"
    assert get(app, "/weightferry/status").status_code == 404  # reached the app, which has none here
