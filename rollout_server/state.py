"""What the server is doing and why: the one object that the watcher writes and the routes read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from .refusals import RefusalKind

NUM_REMEMBERED = 100
STATES = ("starting", "serving", "applying", "unhealthy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """One successful apply, in seconds and counts."""

    number: int
    step: int
    stage_s: float
    pause_s: float
    total_s: float
    published_to_served_s: float
    tensors_applied: int
    tensors_unchanged: int
    bytes_applied: int


@dataclass(slots=True, kw_only=True)
class Refusal:
    """A version that could not be made active; `retry_at` is by the watcher's clock, None for never."""

    number: int
    kind: RefusalKind
    reason: str
    tries: int
    retry_at: float | None
    num_excused: int = 0  # of the tries, those that say nothing against the version

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "kind": self.kind,
            "reason": self.reason,
            "tries": self.tries,
            "is_final": self.retry_at is None,
        }


@dataclass(slots=True, kw_only=True)
class ServerState:
    """`state` is one of STATES; "unhealthy" is for good."""

    apply: str
    exchange: str
    pause_mode: str = "keep"
    state: str = "starting"
    active_version: int = 0
    active_step: int | None = None
    run_id: str | None = None
    newest_version: int = 0
    pinned_version: int | None = None
    are_updates_paused: bool = False
    why: str = "no version has been published yet: the base answers"
    problem: str | None = None
    base: dict[str, Any] | None = None
    applied: list[Applied] = field(default_factory=list)
    refused: dict[int, Refusal] = field(default_factory=dict)
    forgotten: set[int] = field(default_factory=set)  # refused, too, their reasons no longer kept
    num_leases: int = 0
    # every number that became active after the start, by which a request knows what changed since it arrived
    activated: list[int] = field(default_factory=list)
    replacement_ended: asyncio.Event | None = None
    # kept by the middleware: how many requests use each version's adapter, and their tasks
    in_use: Counter[int] = field(default_factory=Counter)
    in_flight: set[asyncio.Future] = field(default_factory=set)
    working: set[asyncio.Future] = field(default_factory=set)  # of these, those that may ask the engine

    @property
    def unhealthy_reason(self) -> str:
        return self.why if self.state == "unhealthy" else ""

    @property
    def follows_newest(self) -> bool:
        is_held = self.pinned_version is not None or self.are_updates_paused
        return not is_held and self.state != "unhealthy"

    def activate(self, number: int) -> None:
        """Say that from here on this version answers."""
        self.active_version = number
        self.activated.append(number)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """While an engine that does not answer is given other weights; `settled` waits for the end."""
        ended = self.replacement_ended = asyncio.Event()
        try:
            yield
        finally:
            self.replacement_ended = None
            ended.set()

    async def settled(self) -> None:
        """Return when it is known which version answers next; every step of a replacement has a deadline."""
        while self.replacement_ended is not None:
            await self.replacement_ended.wait()

    @property
    def holds_new_requests(self) -> bool:
        """Whether those that come in during a replacement wait before they reach vLLM."""
        return self.pause_mode != "keep"

    def give_up(self, why: str) -> None:
        """Become unhealthy: from here on nothing answers, requests in flight included."""
        self.state, self.why = "unhealthy", why
        for work in self.in_flight:
            work.cancel()

    def remember(self, applied: Applied) -> None:
        self.applied = [*self.applied, applied][-NUM_REMEMBERED:]

    def refuse(self, refusal: Refusal) -> None:
        self.refused[refusal.number] = refusal
        while len(self.refused) > NUM_REMEMBERED:
            oldest = min(self.refused)
            del self.refused[oldest]
            self.forgotten.add(oldest)

    def outline(self) -> dict[str, Any]:
        """What is active and what holds it there: a part of every answer of ours that is no success."""
        return {
            "state": self.state,
            "active_version": self.active_version,
            "newest_version": self.newest_version,
            "pinned_version": self.pinned_version,
            "are_updates_paused": self.are_updates_paused,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "active_version": self.active_version,
            "active_step": self.active_step,
            "run_id": self.run_id,
            "newest_version": self.newest_version,
            "pinned_version": self.pinned_version,
            "are_updates_paused": self.are_updates_paused,
            "apply": self.apply,
            "pause_mode": self.pause_mode,
            "exchange": self.exchange,
            "why": self.why,
            "problem": self.problem,
            "base": self.base,
            "applied": [asdict(entry) for entry in self.applied],
            "refused": [entry.to_json() for entry in self.refused.values()],
        }
