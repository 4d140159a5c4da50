"""Making a version the one that answers, as a transaction.

Invariant: when a method returns or raises ApplyError, the engine holds exactly the weights of
`state.active_version` and answers; or `state` is "unhealthy" and nothing answers. Called by the watcher, one
call at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..shared.checkpoint import Checkpoint
from ..shared.errors import ApplyError, SlowStorageError, WeightferryError
from ..shared.exchange import Version
from .adapter_check import adapter_files, require_said_scaling, stage_adapter
from .background import Background
from .engine import Engine
from .merged_source import MergedSource, require_base_as_it_was
from .pause import PausePolicy
from .stager import Stager
from .state import ServerState
from .weights import ReloadPlan, WeightSet, plan_reload

NUM_ADAPTERS_KEPT = 3
T = TypeVar("T")
logger = logging.getLogger("weightferry.rollout_server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an apply did; `served` is when the version began to answer, by this host's clock."""

    served: datetime
    stage_s: float
    pause_s: float
    tensors_applied: int
    tensors_unchanged: int
    bytes_applied: int


async def _staged(
    background: Background, stager: Stager, version: Version, stage: Callable[[], T], num_bytes: int
) -> T:
    """What `stage` returns; where it comes too late, its files go as soon as it ends."""
    try:
        return await background.run("staging", stage, num_bytes=num_bytes)
    except SlowStorageError:
        background.later(lambda: stager.drop(version.number))
        raise


class Applier(Protocol):
    """One way to make a version active."""

    async def apply(self, version: Version) -> Outcome: ...


class MergedApplier:
    """Replaces the engine's own weights by a version's merged ones, which `source` brings to this host."""

    def __init__(
        self,
        engine: Engine,
        stager: Stager,
        state: ServerState,
        background: Background,
        base: Checkpoint,
        source: MergedSource,
        pause_policy: PausePolicy,
    ) -> None:
        self._engine, self._stager, self._state, self._base = engine, stager, state, base
        self._background, self._source, self._pause_policy = background, source, pause_policy
        self._active, self._active_number = source.base_set, 0

    async def apply(self, version: Version) -> Outcome:
        started = time.monotonic()
        size_bytes = self._source.num_bytes(version.manifest)
        wanted = await _staged(
            self._background, self._stager, version, lambda: self._stage(version), size_bytes
        )
        plan = plan_reload(self._active, wanted, self._base.specs)
        try:
            await self._check_base(plan)
            staged = time.monotonic()
            with self._state.replacing():
                await self._swap(plan, version)
        except WeightferryError:
            self._stager.drop(version.number)
            raise
        previous, self._active, self._active_number = self._active_number, wanted, version.number
        served, resumed = datetime.now(UTC), time.monotonic()
        self._background.later(lambda: self._stager.drop(previous))
        return Outcome(
            served=served,
            stage_s=staged - started,
            pause_s=resumed - staged,
            tensors_applied=plan.num_tensors,
            tensors_unchanged=plan.num_unchanged,
            bytes_applied=plan.size_bytes,
        )

    def _stage(self, version: Version) -> WeightSet:
        try:
            return self._source.stage(version)
        except BaseException:
            self._stager.drop(version.number)
            raise

    async def _check_base(self, plan: ReloadPlan) -> None:
        """What the engine is to read from the base's files must still be the base."""
        await self._background.run(
            "check of the base",
            lambda: require_base_as_it_was(plan.parts, self._source.base_set, self._base),
            num_bytes=plan.size_bytes,
        )

    async def _swap(self, plan: ReloadPlan, version: Version) -> None:
        """Pause, load, clear, label, resume; on failure the previous weights come back first."""
        self._state.state = "applying"
        await self._pause()
        try:
            await self._load(plan)
            await self._engine.label(str(version.number))
            # moved before resume: no answer of the new weights can carry the old number
            self._state.activate(version.number)
        except Exception as error:
            await self._restore(error)
            raise ApplyError(str(error)) from error
        await self._resume_or_fail()

    async def _pause(self) -> None:
        """Stop the engine; if that fails no weights have changed, and it goes on with them."""
        try:
            await self._pause_policy.pause(self._engine, self._state)
        except Exception as error:
            await self._resume_or_fail()
            raise error if isinstance(error, ApplyError) else ApplyError(str(error)) from error

    async def _load(self, plan: ReloadPlan) -> None:
        num_loaded = await self._engine.reload(plan.parts)
        if num_loaded != plan.num_tensors:
            raise ApplyError(f"{plan.num_tensors} tensors expected, {num_loaded} loaded")
        await self._engine.reset_prefix_cache()

    async def _restore(self, cause: Exception) -> None:
        """Load all of the previous weights: after a failure the engine's state is not known."""
        try:
            plan = plan_reload(None, self._active, self._base.specs)
            await self._check_base(plan)
            await self._load(plan)
            await self._engine.label(str(self._active_number))
        except Exception as error:
            self._state.give_up(
                f"apply failed ({cause}), and version {self._active_number} could not be restored: {error}"
            )
            raise ApplyError(self._state.why) from error
        await self._resume_or_fail()

    async def _resume_or_fail(self) -> None:
        try:
            await self._engine.resume()
        except Exception as error:
            self._state.give_up(f"vLLM did not resume: {error}")
            raise ApplyError(self._state.why) from error


class AdapterApplier:
    """Gives the public name a version's adapter; running requests finish with the one they have.

    Invariant: an adapter that a request was given stays loaded, and its directory stays, until that request
    has ended: vLLM reads an evicted adapter's directory again, and one that is gone ends the engine.
    """

    def __init__(
        self,
        engine: Engine,
        stager: Stager,
        state: ServerState,
        background: Background,
        base: Checkpoint,
        public_name: str,
    ) -> None:
        self._engine, self._stager, self._state, self._base = engine, stager, state, base
        self._background, self._public_name = background, public_name
        self._kept: dict[int, Any] = {}
        engine.route_public_names()

    async def apply(self, version: Version) -> Outcome:
        started = time.monotonic()
        if version.number in self._kept:  # a way back: what is loaded is not fetched again
            return await self._switch(version.number, self._kept.pop(version.number), started, 0, 0)
        num_bytes = sum(file.size_bytes for file in adapter_files(version.manifest))
        directory, num_tensors = await _staged(
            self._background, self._stager, version, lambda: self._stage(version), num_bytes
        )
        self._state.state = "applying"
        handle = await self._add(version, directory)
        return await self._switch(version.number, handle, started, num_tensors, num_bytes)

    async def _switch(
        self, number: int, handle: Any, started: float, num_tensors: int, num_bytes: int
    ) -> Outcome:
        # no await in between: a request that is given this adapter finds its number, and the other way round
        self._engine.route_to(handle, number)
        self._state.activate(number)
        served, switched = datetime.now(UTC), time.monotonic()
        self._kept[number] = handle
        await self._drop_old()
        return Outcome(
            served=served,
            stage_s=switched - started,
            pause_s=0.0,
            tensors_applied=num_tensors,
            tensors_unchanged=len(self._base.specs),
            bytes_applied=num_bytes,
        )

    async def _add(self, version: Version, directory: Path) -> Any:
        try:
            return await self._engine.add_adapter(f"{self._public_name}@v{version.number}", directory)
        except BaseException:
            self._stager.drop(version.number)
            raise

    def _stage(self, version: Version) -> tuple[Path, int]:
        try:
            directory, num_tensors = stage_adapter(self._stager, version, self._base.specs)
            if (entry := version.manifest.adapter) is not None:
                require_said_scaling(directory, entry)
            return directory, num_tensors
        except BaseException:
            self._stager.drop(version.number)
            raise

    async def _drop_old(self) -> None:
        """Forget adapters that no request uses; the new version answers, so a failure is only said."""
        old = [number for number in list(self._kept)[:-NUM_ADAPTERS_KEPT] if not self._state.in_use[number]]
        for number in old:
            try:
                await self._engine.remove_adapter(self._kept.pop(number))
            except Exception as error:
                logger.warning("rollout_server: the adapter of version %d: %s", number, error)
            self._stager.drop(number)
