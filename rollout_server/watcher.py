"""Looks at the exchange at an interval and has the newest good version applied.

Invariants: the newest version goes first and is never held up by a bad one; a bad one is tried a bounded
number of times and named in the state; nothing that happens here ends the task. Runs in API process 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from ..shared.base import BaseIdentity
from ..shared.errors import ApplyError, ExchangeNotFoundError, WeightferryError
from ..shared.exchange import Exchange, Version
from .applier import Applier
from .settings import ServerSettings
from .state import Applied, ServerState

logger = logging.getLogger("weightferry.rollout_server")
T = TypeVar("T")


class Watcher:
    """One exchange, one applier."""

    def __init__(
        self, settings: ServerSettings, state: ServerState, applier: Applier, base: BaseIdentity
    ) -> None:
        self._settings, self._state, self._applier, self._base = settings, state, applier, base
        self._exchange: Exchange | None = None
        self._reader = f"{socket.gethostname()}-{os.getpid()}"

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._settings.interval)

    async def look(self) -> None:
        """One look; what goes wrong is said in the state, and tried again at the next."""
        try:
            await self._look()
            self._state.problem = None
        except ExchangeNotFoundError:
            self._state.problem = None  # the trainer has not made it yet
        except Exception as error:
            if str(error) != self._state.problem:
                logger.warning("rollout_server: %s", error)
            self._state.problem = str(error)
        if self._state.state == "starting":
            self._state.state = "serving"

    async def _look(self) -> None:
        if self._exchange is None:
            self._exchange = await self._in_thread(self._open)
        pointer = await self._in_thread(self._exchange.newest_number)
        if pointer <= self._state.newest_version and not self._waits_for_retry():
            return
        versions = await self._in_thread(self._exchange.versions)
        if versions:
            self._state.newest_version = versions[-1].number
        for version in reversed(versions):
            if version.number <= self._state.active_version or self._state.state == "unhealthy":
                return
            if self._may_try(version.number) and await self._try(version):
                return

    def _open(self) -> Exchange:
        exchange = Exchange.open(self._settings.exchange)
        exchange.require_base(self._base)
        return exchange

    def _waits_for_retry(self) -> bool:
        return any(
            r.tries < self._settings.tries
            for r in self._state.refused.values()
            if r.number > self._state.active_version
        )

    def _may_try(self, number: int) -> bool:
        refusal = self._state.refused.get(number)
        return refusal is None or refusal.tries < self._settings.tries

    async def _try(self, version: Version) -> bool:
        """Apply one version under a lease; False, and the reason kept, if it cannot be."""
        started = time.monotonic()
        try:
            outcome = await self._apply_leased(version)
        except (WeightferryError, OSError) as error:
            refusal = self._state.refuse(version.number, str(error))
            logger.error(
                "rollout_server: version %d was not applied (try %d); still serving %d. %s. In %s",
                version.number,
                refusal.tries,
                self._state.active_version,
                error,
                version.store.where(version.dir),
            )
            if self._state.state != "unhealthy":
                self._state.state = "serving"
            return False
        self._state.state, self._state.active_step = "serving", version.step
        self._state.run_id, self._state.why = version.run_id, f"version {version.number} was applied"
        self._state.refused.pop(version.number, None)
        self._state.remember(_applied(version, outcome, time.monotonic() - started))
        logger.info(
            "rollout_server: version %d (step %d) answers; paused %.0f ms",
            version.number,
            version.step,
            outcome.pause_s * 1e3,
        )
        return True

    async def _apply_leased(self, version: Version) -> Any:
        if self._exchange is None:
            raise ApplyError("no exchange is open")
        lease = self._exchange.open_version(version.number, reader=self._reader)
        opened = await self._in_thread(lease.__enter__)
        try:
            await self._in_thread(lambda: opened.manifest)
            return await self._applier.apply(opened)
        finally:
            await self._in_thread(lambda: lease.__exit__(None, None, None))

    async def _in_thread(self, act: Callable[[], T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.to_thread(act), self._settings.deadline)
        except TimeoutError:
            raise ApplyError(f"the exchange did not answer within {self._settings.deadline:.0f} s") from None


def _applied(version: Version, outcome: Any, total_s: float) -> Applied:
    """`published_to_served_s` compares clocks of two hosts: right within their skew."""
    created = datetime.fromisoformat(version.entry.created)
    return Applied(
        number=version.number,
        step=version.step,
        stage_s=outcome.stage_s,
        pause_s=outcome.pause_s,
        total_s=total_s,
        published_to_served_s=(datetime.now(UTC) - created).total_seconds(),
        tensors_applied=outcome.tensors_applied,
        tensors_unchanged=outcome.tensors_unchanged,
        bytes_applied=outcome.bytes_applied,
    )
