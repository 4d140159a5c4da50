"""The demo's side of HTTP: asks the policy, and reads which version answered.

Invariant: an answer is never counted for a version that it does not name. A response names its version in a
header; where the weights changed while the request was in flight, a second header names the version at its
arrival, and the response then counts for both, which no measurement accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from ..shared.errors import WeightferryError

# Must agree with weightferry.rollout_server, or else every measurement fails with a missing header.
VERSION_HEADER = "x-weightferry-version"
VERSION_AT_ARRIVAL_HEADER = "x-weightferry-version-start"
STATUS_PATH = "/weightferry/status"
REQUEST_DEADLINE_S = 120.0
CONCURRENT_REQUESTS = 8
# Must be shorter than vLLM keeps an idle connection (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s in 0.32), or else a
# request may go out on a connection that the server is just closing.
KEEP_IDLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One response: the completions in the order of the prompts, and the versions that made them."""

    texts: list[str]
    versions: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one version answered: a score from 0 to 1, and how to show it, with or without a bar."""

    version: int
    score: float
    shown: str
    has_bar: bool = False


class PolicyClient:
    """Asks one rollout server; use as a context manager."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        limits = httpx.Limits(keepalive_expiry=KEEP_IDLE_S)
        self._http = httpx.Client(base_url=url, timeout=REQUEST_DEADLINE_S, trust_env=False, limits=limits)

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def status(self) -> dict[str, Any] | None:
        """What the server says about itself, or None while it does not answer yet."""
        try:
            response = self._http.get(STATUS_PATH, timeout=10.0)
        except httpx.TransportError:
            return None
        return response.json() if response.status_code == httpx.codes.OK else None

    def complete_all(self, batches: Sequence[Sequence[str]], *, max_tokens: int) -> list[Reply]:
        """Greedy completions of several batches of prompts, all batches in flight at once."""
        with ThreadPoolExecutor(max_workers=CONCURRENT_REQUESTS) as pool:
            return list(pool.map(lambda prompts: self._complete(prompts, max_tokens), batches))

    def _complete(self, prompts: Sequence[str], max_tokens: int) -> Reply:
        body = {"model": self._model, "prompt": list(prompts), "max_tokens": max_tokens, "temperature": 0.0}
        try:
            response = self._http.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            raise WeightferryError(f"the server did not answer /v1/completions: {error!r}") from error
        if response.status_code != httpx.codes.OK:
            raise WeightferryError(
                f"the server answered /v1/completions with {response.status_code}: {response.text[:300]}"
            )
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        return Reply(texts=[choice["text"] for choice in choices], versions=named_versions(response.headers))


def named_versions(headers: httpx.Headers) -> frozenset[int]:
    """The version that a response names; two if the weights changed while it was made."""
    names = [headers[name] for name in (VERSION_HEADER, VERSION_AT_ARRIVAL_HEADER) if name in headers]
    if VERSION_HEADER not in headers or not all(name.isdecimal() for name in names):
        raise WeightferryError(
            f"a response names no version in {VERSION_HEADER}: found {names or 'no such header'}"
        )
    return frozenset(int(name) for name in names)
