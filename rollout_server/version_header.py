"""The header by which every response names the version that made it; no response of another version than the
one asked for, and none when unhealthy.

`x-weightferry-version` is the version active when the response's first bytes were sent (0: the base); where
another was active since the request arrived, `x-weightferry-version-start` names the one at arrival too. The
head waits for those bytes: vLLM sends a stream's head before its first token, which an apply may delay. With
adapters a request keeps the adapter that it was given at vLLM's look-up, whatever becomes active meanwhile:
there the look-up is recorded, and it alone counts. The same record says which adapters are still in use.

A request that asks for a version (wanted_version.py) is judged before it reaches vLLM, and again with all
that is sent: an apply may come in between. It gets 409; a response that has begun is cut off.

Websockets are refused: vLLM's (`/v1/realtime`) go on for many answers, which no header could name.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextvars import ContextVar
from typing import Any

from ..shared.errors import UsageError
from .state import ServerState
from .wanted_version import WantedVersion

logger = logging.getLogger("weightferry.rollout_server")
VERSION_HEADER = b"x-weightferry-version"
VERSION_AT_ARRIVAL_HEADER = b"x-weightferry-version-start"
CONTROL_PREFIX = "/weightferry"
STATUS_PATH = f"{CONTROL_PREFIX}/status"
POLICY_VIOLATION = 1008  # RFC 6455, 7.4.1
ALWAYS_ANSWERED = (STATUS_PATH, "/metrics")  # they show what is wrong, and nothing that weights made


class Request:
    """What is recorded for one request: what it asks for, and the versions that may make its answer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.wanted = WantedVersion()
        self.given: list[int] = []  # the versions whose adapters it was given, the last one last
        self.is_refused = asyncio.Event()
        self.arrive()

    def arrive(self) -> None:
        """From here on, what becomes active may have a part in the answer."""
        self._at_arrival, self._num_before = self._state.active_version, len(self._state.activated)

    def record(self, number: int) -> None:
        self.given.append(number)
        self._state.in_use[number] += 1
        self.judge()

    def judge(self) -> bool:
        """Whether the answer may go on: False for good once an unwanted version has a part in it."""
        if not self.wanted.is_met_by(self.versions):
            self.is_refused.set()
        return not self.is_refused.is_set()

    def end(self) -> None:
        for number in self.given:
            self._state.in_use[number] -= 1
            if not self._state.in_use[number]:
                del self._state.in_use[number]

    @property
    def versions(self) -> list[int]:
        """Those that may have made the answer so far, in the order in which they were active."""
        if self.given:
            return self.given[-1:]
        return [self._at_arrival, *self._state.activated[self._num_before :]]

    def headers(self) -> list[tuple[bytes, bytes]]:
        versions = self.versions
        headers = [(VERSION_HEADER, str(versions[-1]).encode())]
        if len(versions) > 1:
            headers.append((VERSION_AT_ARRIVAL_HEADER, str(versions[0]).encode()))
        return headers


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
        if scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)
            return
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
            else:
                await self._answer(scope, receive, response, request, state)
        finally:
            _request.reset(token)
            request.end()

    async def _answer(
        self, scope: Any, receive: Any, response: _Response, request: Request, state: ServerState
    ) -> None:
        is_control = scope["path"].startswith(f"{CONTROL_PREFIX}/")
        may_work = scope["method"] == "POST" and not is_control  # for all that this knows
        if not is_control and not state.unhealthy_reason:
            try:
                request.wanted = WantedVersion.of(scope["headers"])
            except UsageError as error:
                await response.refuse(400, str(error), {"message": str(error)})
                return
        if not request.wanted.is_any:
            receive = _until_refused(receive, request.is_refused)
        if not request.wanted.is_any or (may_work and state.holds_new_requests):
            await _arrive_settled(request, state)
        is_answered = False
        if not request.is_refused.is_set() and not state.unhealthy_reason:
            is_answered = await self._finished(scope, receive, response, state, may_work)
        if not is_answered and state.unhealthy_reason:
            await response.refuse(503, f"unhealthy: {state.unhealthy_reason}")
        elif request.is_refused.is_set():
            reason = f"{request.wanted} was asked for, {_listed(request.versions)} would answer"
            body = {"message": reason, "wanted": request.wanted.to_json()} | state.outline()
            await response.refuse(409, reason, body)

    async def _finished(
        self, scope: Any, receive: Any, response: _Response, state: ServerState, may_work: bool
    ) -> bool:
        """Run the app; False if the server became unhealthy first: its paused engine would never answer."""
        work = asyncio.ensure_future(self._app(scope, receive, response.send))
        state.in_flight.add(work)
        if may_work:
            state.working.add(work)
        try:
            await work
        except asyncio.CancelledError:
            if state.unhealthy_reason:
                return False
            raise
        finally:
            state.in_flight.discard(work)
            state.working.discard(work)
        return True


async def _refuse_websocket(scope: Any, receive: Any, send: Any) -> None:
    """Close before it is accepted, which the client sees as 403."""
    await receive()
    logger.warning(
        "rollout_server: refused a websocket to %s: its answers would name no version", scope["path"]
    )
    await send(
        {"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "answers would name no version"}
    )


async def _arrive_settled(request: Request, state: ServerState) -> None:
    """Judge a request by what will answer it: while weights are replaced, that is known at the end only.

    That end is bounded by the deadlines of the apply. With adapters vLLM's look-up says what will answer.
    """
    await state.settled()
    request.arrive()
    if state.apply != "adapter":
        request.judge()


def _until_refused(receive: Any, is_refused: asyncio.Event) -> Any:
    """`receive` for an app that shall stop work on a refused request: as if its client had gone."""

    async def receive_or_disconnect() -> Any:
        coming = [asyncio.ensure_future(receive()), asyncio.ensure_future(is_refused.wait())]
        try:
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if is_refused.is_set() else coming[0].result()
        finally:
            for task in coming:
                task.cancel()

    return receive_or_disconnect


def _listed(versions: list[int]) -> str:
    return ", then ".join(f"version {number}" for number in versions)


class _Response:
    """The sending side of one request."""

    def __init__(self, send: Any, request: Request) -> None:
        self._send, self._request, self._has_begun = send, request, False
        self._head: Any = None

    async def send(self, message: Any) -> None:
        """Pass on what the app sends, unless its request is refused."""
        if message["type"] == "http.response.start":
            self._head = message
        elif self._request.judge():
            await self._pass_on(message)

    async def _pass_on(self, message: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [*self._head.get("headers", ()), *self._request.headers()]
            await self._send(self._head | {"headers": headers})
        await self._send(message)

    async def refuse(self, status: int, reason: str, body: dict[str, Any] | None = None) -> None:
        """Answer with `body` as JSON, or the reason as text; a response that has begun is cut off instead,
        which its client sees as an error.
        """
        if self._has_begun:
            raise ConnectionAbortedError(reason)
        kind, text = ("text/plain", reason) if body is None else ("application/json", json.dumps(body))
        data = f"{text}\n".encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(data)).encode())]
        self._head = {"type": "http.response.start", "status": status, "headers": headers}
        await self._pass_on({"type": "http.response.body", "body": data})
