"""The header by which every response names the version that made it.

`x-weightferry-version` is the version active when the response's head was sent (0: the base); where another
was active when the request arrived, `x-weightferry-version-start` names that one too. With adapters a request
keeps the adapter that it was given at look-up, so the recorded look-up counts, not the active version.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from .state import ServerState

VERSION_HEADER = b"x-weightferry-version"
VERSION_AT_ARRIVAL_HEADER = b"x-weightferry-version-start"

# A list, so that tasks which inherit a copy of the context still write to the request's own box.
_recorded: ContextVar[list[int] | None] = ContextVar("weightferry_recorded_version", default=None)


def record_version(number: int) -> None:
    """Say which version serves the request that this task works for."""
    box = _recorded.get()
    if box is not None:
        box[:] = [number]


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
        at_arrival = state.active_version
        box: list[int] = []
        token = _recorded.set(box)

        async def send_named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {
                    "headers": [*message.get("headers", ()), *_headers(at_arrival, state.active_version, box)]
                }
            await send(message)

        try:
            if (reason := state.unhealthy_reason) and scope["path"] != "/weightferry/status":
                await _refuse(send_named, reason)
            else:
                await self._app(scope, receive, send_named)
        finally:
            _recorded.reset(token)


def _headers(at_arrival: int, now: int, recorded: list[int]) -> list[tuple[bytes, bytes]]:
    if recorded:
        return [(VERSION_HEADER, str(recorded[0]).encode())]
    headers = [(VERSION_HEADER, str(now).encode())]
    if now != at_arrival:
        headers.append((VERSION_AT_ARRIVAL_HEADER, str(at_arrival).encode()))
    return headers


async def _refuse(send: Any, reason: str) -> None:
    body = f"unhealthy: {reason}\n".encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
