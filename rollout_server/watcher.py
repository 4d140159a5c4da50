"""Looks at the exchange, each interval and at file events, and has the newest good version applied.

Invariants: the newest version goes first and is never held up by a bad one; a bad one is tried a bounded
number of times (what the engine or the storage is to blame for does not count) and named in the state; while
the operator holds updates nothing is applied but what he asks for; one apply at a time; nothing that happens
here ends the task. Runs in API process 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from ..shared.base import BaseIdentity
from ..shared.errors import (
    ApplyError,
    BaseMismatchError,
    EngineBusyError,
    ExchangeNotFoundError,
    SlowStorageError,
    WeightferryError,
)
from ..shared.exchange import Exchange, Version
from ..shared.pointer import require_log_reaches_pointer
from ..shared.watch import INTERVAL_S, MIN_GAP_S, Watch
from .applier import Applier, Outcome
from .background import Background
from .metrics import Metrics
from .refusals import kind_of
from .settings import ServerSettings
from .state import Applied, Refusal, ServerState

# A busy engine, a full disk and a bucket that is away say nothing against a version, which may be the last.
EXCUSED = (EngineBusyError, SlowStorageError, OSError)
logger = logging.getLogger("weightferry.rollout_server")


class Watcher:
    """One exchange, one applier."""

    def __init__(
        self,
        settings: ServerSettings,
        state: ServerState,
        applier: Applier,
        background: Background,
        base: BaseIdentity,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._state, self._applier, self._base = settings, state, applier, base
        self._background, self._metrics, self._clock = background, metrics, clock
        self._checking_key = settings.checking_key
        self._exchange: Exchange | None = None
        self._watch: Watch | None = None
        self._wake, self._num_failures = asyncio.Event(), 0
        self._turn = asyncio.Lock()  # held by whoever applies: a look, or the operator's rollback
        self._numbers: list[int] = []  # what the log retained at the last look
        self._reader = f"{socket.gethostname()}-{os.getpid()}"

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await self._rest()

    async def _rest(self) -> None:
        """Until the next look is due, or a file event says that there is something to see."""
        pause_s = self._settings.interval or INTERVAL_S
        if self._exchange is not None:
            try:
                self._watch = self._watch or await self._background.run(
                    "starting to watch", self._start_watch(self._exchange)
                )
                pause_s = self._watch.pause_s(self._num_failures)
            except Exception as error:  # only the wake-up is lost: the next look says what is wrong
                logger.warning("rollout_server: %s", error)
        await asyncio.sleep(MIN_GAP_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(pause_s - MIN_GAP_S, 0))
        self._wake.clear()

    def _start_watch(self, exchange: Exchange) -> Callable[[], Watch]:
        loop = asyncio.get_running_loop()

        def notice() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        return lambda: Watch(exchange, interval_s=self._settings.interval, on_event=notice)

    async def look(self) -> None:
        """One look; what goes wrong is said in the state, and tried again at the next."""
        async with self._turn:
            await self._look_and_say()

    async def roll_back(self, number: int) -> None:
        """Make this version active and stay there until `unpin`, whatever is published meanwhile.

        VersionNotFoundError if the exchange has none such any more, ApplyError if it is refused; both leave
        what is active, and what was pinned, as it is.
        """
        async with self._turn:
            if self._state.unhealthy_reason:  # since this was asked for: the engine holds nobody knows what
                raise ApplyError(f"the server is unhealthy: {self._state.unhealthy_reason}; restart it")
            if number != self._state.active_version:
                await self._apply_asked(number)
                self._state.why = f"the operator rolled back to version {number}"
            self._state.pinned_version = number

    async def pin(self) -> None:
        """Stay at the active version until `unpin`."""
        async with self._turn:
            self._state.pinned_version = self._state.active_version

    def unpin(self) -> None:
        """Follow the newest version again."""
        self._state.pinned_version = None
        self._wake.set()

    async def pause_updates(self) -> None:
        """Apply nothing until `resume_updates`; an apply under way has ended when this returns."""
        self._state.are_updates_paused = True
        async with self._turn:
            pass

    def resume_updates(self) -> None:
        self._state.are_updates_paused = False
        self._wake.set()

    async def list_versions(self) -> list[Version]:
        """What the exchange retains at this moment, oldest first; none before there is an exchange."""
        if self._exchange is None:
            return []
        return await self._background.run("reading the log", self._exchange.versions)

    async def _apply_asked(self, number: int) -> None:
        refusal = self._state.refused.get(number)
        if refusal is not None and refusal.retry_at is None:
            raise ApplyError(f"version {number} is refused for good: {refusal.reason}")
        if self._exchange is None:
            self._exchange = await self._background.run("opening the exchange", self._open)
        exchange = self._exchange
        version = await self._background.run("reading the log", lambda: exchange.version(number))
        if not await self._try(exchange, version):
            raise ApplyError(f"version {number} was not applied: {self._state.refused[number].reason}")

    async def _look_and_say(self) -> None:
        try:
            await self._look()
            self._state.problem, self._num_failures = None, 0
        except ExchangeNotFoundError:
            self._state.problem = None  # the trainer has not made it yet
        except Exception as error:
            self._num_failures += 1
            if str(error) != self._state.problem:
                logger.warning("rollout_server: %s", error)
            self._state.problem = str(error)
        if self._state.state == "starting":
            self._state.state = "serving"

    async def _look(self) -> None:
        if self._exchange is None:
            self._exchange = await self._background.run("opening the exchange", self._open)
        if not await self._has_news(self._exchange) and not self._has_work():
            return
        versions = await self._background.run("reading the log", self._read_log(self._exchange))
        self._numbers = [version.number for version in versions]
        if versions:
            self._state.newest_version = versions[-1].number
        for version in reversed(versions):
            if version.number <= self._state.active_version or not self._state.follows_newest:
                return
            if not self._may_try(version.number):
                continue
            if await self._try(self._exchange, version):
                return
            if await self._has_news(self._exchange):
                self._wake.set()  # it goes before the older ones that are left
                return

    def _read_log(self, exchange: Exchange) -> Callable[[], list[Version]]:
        def read() -> list[Version]:
            require_log_reaches_pointer(exchange)
            return exchange.versions()

        return read

    def _open(self) -> Exchange:
        exchange = Exchange.open(self._settings.exchange, require_signature=self._checking_key)
        exchange.require_base(self._base)
        return exchange

    async def _has_news(self, exchange: Exchange) -> bool:
        pointer = await self._background.run("reading the pointer", exchange.newest_number)
        if pointer < self._state.newest_version:
            raise ApplyError(
                f"{exchange.store.where('')} says that its newest version is {pointer}, but it had been "
                f"{self._state.newest_version}; if another exchange has taken its place, restart this server"
            )
        return pointer > self._state.newest_version

    def _has_work(self) -> bool:
        """A retry is due, or what was published while updates were held."""
        return self._state.follows_newest and any(
            number > self._state.active_version and self._may_try(number) for number in self._numbers
        )

    def _may_try(self, number: int) -> bool:
        if number in self._state.forgotten:
            return False
        refusal = self._state.refused.get(number)
        return refusal is None or (refusal.retry_at is not None and self._clock() >= refusal.retry_at)

    async def _try(self, exchange: Exchange, version: Version) -> bool:
        """Apply one version under a lease; False, and the reason kept, if it cannot be."""
        started = time.monotonic()
        try:
            outcome = await self._apply_leased(exchange, version)
            self._serves(version, outcome, time.monotonic() - started)
        except Exception as error:
            self._refuse(version, error)
        if self._state.state != "unhealthy":
            self._state.state = "serving"
        return self._state.active_version == version.number

    def _refuse(self, version: Version, error: Exception) -> None:
        known = self._state.refused.get(version.number)
        tries = known.tries + 1 if known else 1
        num_excused = (known.num_excused if known else 0) + isinstance(error, EXCUSED)
        wait_s = self._settings.retry_after(tries, num_excused)
        # what is not ours carries no words of its own about what it is
        reason = str(error) if isinstance(error, WeightferryError | OSError) else repr(error)
        kind = kind_of(error)
        self._metrics.count_refusal(kind)
        self._state.refuse(
            Refusal(
                number=version.number,
                kind=kind,
                reason=reason,
                tries=tries,
                num_excused=num_excused,
                retry_at=None if wait_s is None else self._clock() + wait_s,
            )
        )
        logger.error(
            "rollout_server: version %d was not applied (try %d, %s); still serving %d. %s. In %s",
            version.number,
            tries,
            "the last" if wait_s is None else f"the next in {wait_s:.0f} s",
            self._state.active_version,
            reason,
            version.store.where(version.dir),
        )

    def _serves(self, version: Version, outcome: Outcome, total_s: float) -> None:
        self._state.active_step, self._state.run_id = version.step, version.run_id
        self._state.why = f"version {version.number} was applied"
        self._state.refused.pop(version.number, None)
        applied = _applied(version, outcome, total_s)
        self._state.remember(applied)
        self._metrics.count_apply(applied)
        logger.info(
            "rollout_server: version %d (step %d) answers; paused %.0f ms",
            version.number,
            version.step,
            outcome.pause_s * 1e3,
        )

    async def _apply_leased(self, exchange: Exchange, version: Version) -> Outcome:
        lease = exchange.open_version(version.number, reader=self._reader)
        opened = await self._background.run("taking the lease", lease.__enter__)
        self._state.num_leases += 1
        try:
            manifest = await self._background.run("reading the manifest", lambda: opened.manifest)
            if manifest.exchange_id != exchange.exchange_id or not manifest.base.is_same_as(self._base):
                raise BaseMismatchError("its manifest belongs to another exchange or another base")
            return await self._applier.apply(opened)
        finally:
            await self._give_back(lambda: lease.__exit__(None, None, None))

    async def _give_back(self, release: Callable[[], object]) -> None:
        """A lease that cannot be given back ends by its ttl; what was applied stays applied."""
        self._state.num_leases -= 1
        try:
            await self._background.run("giving the lease back", release)
        except Exception as error:
            logger.warning("rollout_server: %s", error)


def _applied(version: Version, outcome: Outcome, total_s: float) -> Applied:
    """`published_to_served_s` compares clocks of two hosts: right within their skew."""
    created = datetime.fromisoformat(version.entry.created)
    return Applied(
        number=version.number,
        step=version.step,
        stage_s=outcome.stage_s,
        pause_s=outcome.pause_s,
        total_s=total_s,
        published_to_served_s=(outcome.served - created).total_seconds(),
        tensors_applied=outcome.tensors_applied,
        tensors_unchanged=outcome.tensors_unchanged,
        bytes_applied=outcome.bytes_applied,
    )
