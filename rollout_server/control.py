"""The routes by which an operator steers the server: roll back, pin, pause updates, and see what there is.

Invariant: nothing that changes state answers without the token, and without a token configured these routes
stay closed. Served by vLLM's own API server, so they listen where it listens: on loopback by default.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..shared.errors import ExchangeNotFoundError, UsageError, VersionNotFoundError, WeightferryError
from ..shared.exchange import Version
from .state import ServerState
from .version_header import CONTROL_PREFIX
from .watcher import Watcher


class Control:
    """One per server; `steer` gives it its watcher before the server listens."""

    def __init__(self, state: ServerState, token: str | None) -> None:
        self._state, self._token = state, token
        self._watcher: Watcher | None = None

    def steer(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def attach(self, app: Any) -> None:
        """Add the routes to a FastAPI app."""
        app.add_api_route(f"{CONTROL_PREFIX}/versions", self._versions, methods=["GET"], response_model=None)
        acts: dict[str, Callable[[Watcher, Any], Awaitable[None]]] = {
            "rollback": _roll_back,
            "pin": lambda watcher, _body: watcher.pin(),
            "unpin": _unpin,
            "pause-updates": lambda watcher, _body: watcher.pause_updates(),
            "resume-updates": _resume_updates,
        }
        for name, act in acts.items():
            path = f"{CONTROL_PREFIX}/{name}"
            app.add_api_route(path, self._route(act), methods=["POST"], response_model=None, name=name)

    def _route(self, act: Callable[[Watcher, Any], Awaitable[None]]) -> Callable:
        async def route(request: Request) -> Response:
            if (closed := self._why_closed(request)) is not None:
                return closed
            if self._watcher is None:
                return _answer(503, "the server is starting; try again")
            body = await _body(request)
            # a task of its own: a client that goes away, or a server that turns unhealthy, leaves no apply
            # half-way
            return await asyncio.shield(asyncio.create_task(self._perform(act(self._watcher, body))))

        return route

    async def _perform(self, act: Awaitable[None]) -> Response:
        try:
            await act
        except (VersionNotFoundError, ExchangeNotFoundError) as error:
            return _answer(404, str(error), self._state)
        except UsageError as error:
            return _answer(400, str(error), self._state)
        except (WeightferryError, OSError) as error:
            return _answer(409, str(error), self._state)
        return _answer(200, "done", self._state)

    def _why_closed(self, request: Request) -> Response | None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = (
            self._token is not None
            and scheme.lower() == "bearer"
            and hmac.compare_digest(given.strip().encode("latin-1"), self._token.encode())
        )
        if is_right:
            return None
        what = (
            "this route is closed: start the server with --token-file"
            if self._token is None
            else "this route needs the header Authorization: Bearer TOKEN with the server's token"
        )
        return _answer(401, what, headers={"www-authenticate": "Bearer"})

    async def _versions(self) -> Response:
        """What the exchange holds, and what this server makes of it."""
        try:
            versions = [] if self._watcher is None else await self._watcher.list_versions()
        except (WeightferryError, OSError) as error:
            return _answer(503, str(error), self._state)
        return JSONResponse(self._state.outline() | {"versions": [self._row(entry) for entry in versions]})

    def _row(self, version: Version) -> dict[str, Any]:
        refusal = self._state.refused.get(version.number)
        return {
            "number": version.number,
            "step": version.step,
            "run_id": version.run_id,
            "created": version.entry.created,
            "is_active": version.number == self._state.active_version,
            "is_pinned": version.number == self._state.pinned_version,
            "refused": None if refusal is None else refusal.reason,
        }


async def _roll_back(watcher: Watcher, body: Any) -> None:
    number = body.get("number") if isinstance(body, dict) else None
    if type(number) is not int or number < 0:
        raise UsageError('expected a JSON body {"number": N} with the number of a version')
    await watcher.roll_back(number)


async def _unpin(watcher: Watcher, _body: Any) -> None:
    watcher.unpin()


async def _resume_updates(watcher: Watcher, _body: Any) -> None:
    watcher.resume_updates()


async def _body(request: Request) -> Any:
    try:
        return await request.json()
    except ValueError:
        return None


def _answer(
    status: int, message: str, state: ServerState | None = None, headers: dict[str, str] | None = None
) -> Response:
    """`message`, and beside it what is active and why it stays so."""
    body = {"message": message} | ({} if state is None else state.outline())
    return JSONResponse(body, status_code=status, headers=headers)
