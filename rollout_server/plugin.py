"""The vLLM endpoint plug-in: our routes, the version header, and the watcher's task.

vLLM loads it when VLLM_PLUGINS names it (entry point group vllm.endpoint_plugins, 0.26 and newer). It acts in
API process 0 only: a watcher per process would pause and resume against the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
from argparse import Namespace
from typing import Any

from ..shared.base import identify_base
from ..shared.checkpoint import Checkpoint
from ..shared.errors import UnsupportedError
from .applier import AdapterApplier, Applier, MergedApplier
from .background import Background
from .cache_dir import take_cache_dir
from .closed_routes import replace_routes, require_closed
from .control import Control
from .engine import VllmEngine, require_tested_version
from .fitting_start import require_fitting_start
from .merged_source import FoldSource, ShardSource
from .metrics import Metrics
from .self_check import require_faithful_reload
from .settings import ServerSettings
from .stager import Stager
from .state import ServerState
from .version_header import STATUS_PATH, VersionHeader
from .watcher import Watcher

MIDDLEWARE = f"{VersionHeader.__module__}.{VersionHeader.__name__}"


class RolloutPlugin:
    """One per API server process; the protocol is vllm.plugins.endpoint_plugins.interface's."""

    name = "weightferry"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        require_tested_version()
        _show_log()
        self._settings = ServerSettings.from_environment()
        self._state = ServerState(
            apply=self._settings.apply,
            exchange=self._settings.exchange,
            pause_mode=self._settings.pause_mode,
        )
        self._control = Control(self._state, self._settings.control_token)

    def attach_router(self, app: Any) -> None:
        self._app = app
        app.state.weightferry = self._state

        async def status() -> dict[str, Any]:
            return self._state.to_json()

        app.add_api_route(STATUS_PATH, status, methods=["GET"])
        self._control.attach(app)
        replace_routes(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start watching. The first look ends before the server listens, so that it starts on the newest."""
        if engine_client is None:
            return
        require_closed(os.environ)  # not sooner: vLLM goes on without a plug-in that cannot be made
        require_fitting_start(engine_client, self._settings.apply)
        if not any(entry.cls is VersionHeader for entry in self._app.user_middleware):
            raise UnsupportedError(
                f"answers would not name their version: start vLLM with --middleware {MIDDLEWARE}"
            )
        engine = VllmEngine(engine_client, state.openai_serving_models, self._settings.deadline)
        base = Checkpoint.open(self._settings.base or args.model)
        identity, digests = await asyncio.to_thread(identify_base, base)
        self._state.base = identity.to_json()
        background = Background(self._settings.deadline)
        stager = Stager(take_cache_dir(self._settings.cache_dir))
        applier = self._applier(engine, stager, background, base, digests)
        metrics = Metrics(self._state, lambda: stager.fetched_bytes)
        watcher = Watcher(self._settings, self._state, applier, background, identity, metrics)
        self._control.steer(watcher)
        if self._settings.apply != "adapter":  # with which vLLM's label says nothing of the adapter, either
            await require_faithful_reload(engine, base, digests)
            await engine.label(str(self._state.active_version))
        await watcher.look()
        self._task = asyncio.create_task(watcher.run())

    def _applier(
        self,
        engine: VllmEngine,
        stager: Stager,
        background: Background,
        base: Checkpoint,
        digests: dict[str, str],
    ) -> Applier:
        if self._settings.apply == "adapter":
            return AdapterApplier(engine, stager, self._state, background, base, engine.public_name)
        source = (FoldSource if self._settings.apply == "fold" else ShardSource)(stager, base, digests)
        policy = self._settings.pause_policy
        return MergedApplier(engine, stager, self._state, background, base, source, policy)


def _show_log() -> None:
    """vLLM configures its own loggers only; ours go to stderr beside them."""
    logger = logging.getLogger("weightferry")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
