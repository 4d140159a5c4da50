"""The header by which every response names the version that made it; and no response when unhealthy.

`x-weightferry-version` is the version active when the response's first bytes were sent (0: the base); where
another was active when the request arrived, `x-weightferry-version-start` names that one too. The head waits
for those bytes: vLLM sends a stream's head before its first token, which an apply may delay. With adapters a
request keeps the adapter that it was given at vLLM's look-up, whatever becomes active meanwhile: there the
look-up is recorded, and it alone counts. The same record says which adapters are still in use.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from .state import ServerState

VERSION_HEADER = b"x-weightferry-version"
VERSION_AT_ARRIVAL_HEADER = b"x-weightferry-version-start"
STATUS_PATH = "/weightferry/status"
ALWAYS_ANSWERED = (STATUS_PATH, "/metrics")  # they show what is wrong, and nothing that weights made


class Request:
    """What is recorded for one request: the versions whose adapters it was given, the last one last."""

    def __init__(self, state: ServerState) -> None:
        self._state, self.at_arrival = state, state.active_version
        self.given: list[int] = []

    def record(self, number: int) -> None:
        self.given.append(number)
        self._state.in_use[number] += 1

    def end(self) -> None:
        for number in self.given:
            self._state.in_use[number] -= 1
            if not self._state.in_use[number]:
                del self._state.in_use[number]

    def headers(self) -> list[tuple[bytes, bytes]]:
        now, before = self._state.active_version, self.at_arrival
        if self.given:
            now = before = self.given[-1]
        headers = [(VERSION_HEADER, str(now).encode())]
        return headers if now == before else [*headers, (VERSION_AT_ARRIVAL_HEADER, str(before).encode())]


# An object, so that tasks which inherit a copy of the context still write to the request's own record.
_request: ContextVar[Request | None] = ContextVar("weightferry_request", default=None)


def record_version(number: int) -> None:
    """Say which version's adapter the request that this task works for was given."""
    request = _request.get()
    if request is not None:
        request.record(number)


class VersionHeader:
    """ASGI middleware for vLLM's --middleware, which makes it the outermost: also errors, health checks and
    refused keys carry the header. What is active it reads from the plug-in's state on the app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: ServerState = scope["app"].state.weightferry
        request = Request(state)
        response = _Response(send, request)
        token = _request.set(request)
        try:
            if scope["path"] in ALWAYS_ANSWERED:
                await self._app(scope, receive, response.send)
            elif state.unhealthy_reason or not await self._finished(scope, receive, response, state):
                await response.refuse(state.unhealthy_reason)
        finally:
            _request.reset(token)
            request.end()

    async def _finished(self, scope: Any, receive: Any, response: _Response, state: ServerState) -> bool:
        """Run the app; False if the server became unhealthy first: its paused engine would never answer."""
        work = asyncio.ensure_future(self._app(scope, receive, response.send))
        state.in_flight.add(work)
        try:
            await work
        except asyncio.CancelledError:
            if state.unhealthy_reason:
                return False
            raise
        finally:
            state.in_flight.discard(work)
        return True


class _Response:
    """The sending side of one request."""

    def __init__(self, send: Any, request: Request) -> None:
        self._send, self._request, self._has_begun = send, request, False
        self._head: Any = None

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if not self._has_begun:
            self._has_begun = True
            headers = [*self._head.get("headers", ()), *self._request.headers()]
            await self._send(self._head | {"headers": headers})
        await self._send(message)

    async def refuse(self, reason: str) -> None:
        """503; a response that has begun is cut off instead, which its client sees as an error."""
        if self._has_begun:
            raise ConnectionAbortedError(f"unhealthy: {reason}")
        body = f"unhealthy: {reason}\n".encode()
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": 503, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
