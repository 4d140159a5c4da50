"""A rollout server around an engine that records what is done to it and fails where a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from tiny_exchange import CHANGED, UNCHANGED, make_base

from weightferry.rollout_server.applier import AdapterApplier, MergedApplier
from weightferry.rollout_server.background import Background
from weightferry.rollout_server.engine import Part
from weightferry.rollout_server.merged_source import FoldSource, ShardSource
from weightferry.rollout_server.metrics import Metrics
from weightferry.rollout_server.settings import ServerSettings, variable
from weightferry.rollout_server.stager import Stager
from weightferry.rollout_server.state import ServerState
from weightferry.rollout_server.watcher import Watcher
from weightferry.rollout_server.worker_extension import read_tensors
from weightferry.shared.base import identify_base
from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.exchange import Exchange
from weightferry.shared.publication import ManifestFields
from weightferry.shared.writer import ExchangeWriter


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """Holds tensors as a real engine would; `failures` are raised by the next reloads, after one tensor."""

    tensors: dict[str, bytes]
    state: ServerState | None = None
    events: list[str] = field(default_factory=list)
    failures: list[Exception | None] = field(default_factory=list)
    pause_failure: Exception | None = None
    resume_failure: Exception | None = None
    num_lost: int = 0
    at_resume: Callable[[], None] = lambda: None
    # as with a real engine, other tasks run meanwhile
    while_pausing: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    adapters: dict[str, Path] = field(default_factory=dict)
    remove_failure: Exception | None = None
    answered_number_at_resume: int = -1

    async def pause(self, mode: str, deadline_s: float) -> None:
        self.events.append("pause" if mode == "keep" else f"pause {mode}")
        await self.while_pausing()
        if self.pause_failure is not None:
            raise self.pause_failure

    async def resume(self) -> None:
        self.events.append("resume")
        if self.resume_failure is not None:
            raise self.resume_failure
        self.at_resume()
        if self.state is not None:
            self.answered_number_at_resume = self.state.active_version

    async def reload(self, parts: tuple[Part, ...]) -> int:
        self.events.append("reload")
        failure = self.failures.pop(0) if self.failures else None
        count = 0
        for part in parts:
            for name, tensor in read_tensors(Path(part.file), list(part.tensors)):
                self.tensors[name] = tensor.numpy().tobytes()
                count += 1
                if failure is not None:
                    raise failure
        return count - self.num_lost

    async def reset_prefix_cache(self) -> None:
        self.events.append("reset")

    async def label(self, name: str) -> None:
        self.events.append(f"label {name}")

    def route_public_names(self) -> None:
        self.events.append("route")

    async def add_adapter(self, name: str, directory: Path) -> Any:
        self.events.append(f"add {name}")
        if failure := self.failures.pop(0) if self.failures else None:
            raise failure
        self.adapters[name] = directory
        return name

    async def remove_adapter(self, handle: Any) -> None:
        self.events.append(f"remove {handle}")
        del self.adapters[handle]
        if self.remove_failure is not None:
            raise self.remove_failure

    def route_to(self, handle: Any, number: int) -> None:
        self.events.append(f"route {number}")


class World:
    """One base, one exchange (not made yet), one server around a fake engine."""

    def __init__(
        self, directory: Path, apply: str = "merged", url: str | None = None, **settings: str
    ) -> None:
        self.base_dir, self.exchange_path = make_base(directory / "base"), directory / "exchange"
        self.url = url or str(self.exchange_path)
        self.cache_dir = directory / "cache"
        self.checkpoint = Checkpoint.open(self.base_dir)
        identity, digests = identify_base(self.checkpoint)
        self.engine = FakeEngine(tensors={n: self.checkpoint.read_bytes(n) for n in self.checkpoint.slots})
        given = {variable(name): value for name, value in settings.items()}
        server_settings = ServerSettings.from_environment(given | {"WEIGHTFERRY_EXCHANGE": self.url})
        self.state = ServerState(apply=apply, exchange=self.url, pause_mode=server_settings.pause_mode)
        self.engine.state = self.state
        self.cache_dir.mkdir()
        stager, self.background = Stager(self.cache_dir), Background(deadline_s=60.0)
        self.published: list[int] = []
        self.now_s = 0.0  # by the watcher's clock, which only tests move
        parts = (self.engine, stager, self.state, self.background, self.checkpoint)
        sources = {"merged": ShardSource, "fold": FoldSource}
        applier = (
            AdapterApplier(*parts, "policy")
            if apply == "adapter"
            else MergedApplier(
                *parts, sources[apply](stager, self.checkpoint, digests), server_settings.pause_policy
            )
        )
        self.registry = CollectorRegistry()
        metrics = Metrics(self.state, lambda: stager.fetched_bytes, self.registry)
        self.watcher = Watcher(
            server_settings, self.state, applier, self.background, identity, metrics, lambda: self.now_s
        )

    def look(self) -> None:
        """One look of the watcher."""
        asyncio.run(self.watcher.look())

    def publish(self, step: int, **damage: Any) -> int:
        """A version of random changed tensors; `damage` replaces tensors before they are written."""
        exchange = Exchange.open(self.exchange_path, base=self.base_dir)
        writer = ExchangeWriter.become(exchange, run_id="run-a", signing_key=damage.get("signing_key"))
        random = np.random.default_rng(1000 + step)
        publication = writer.begin(step)
        values = {name: random.random((8, 4), dtype=np.float32) for name in CHANGED}
        values |= damage.get("values", {})
        specs = self.checkpoint.specs | damage.get("specs", {})
        shard = [(specs[name], value.tobytes()) for name, value in values.items()]
        publication.write_shard("layer-00000.safetensors", shard)
        unchanged = [specs[name] for name in damage.get("unchanged", UNCHANGED)]
        publication.link_base_shard("outer.same.safetensors", unchanged, self.checkpoint.read_bytes)
        publication.tensors[:] = map(damage.get("enter", lambda entry: entry), publication.tensors)
        version = publication.commit(ManifestFields(published="merged", world_size=1))
        writer.close()
        self.published.append(version.number)
        return version.number

    def weights_of(self, number: int) -> dict[str, bytes]:
        """What the engine must hold when it serves this version."""
        if number == 0:
            return {name: self.checkpoint.read_bytes(name) for name in self.checkpoint.slots}
        held = Checkpoint.open(self.complete_directory(number))
        return {name: held.read_bytes(name) for name in held.slots}

    def directory(self, number: int) -> Path:
        return Exchange.open(self.exchange_path).version(number).path

    def complete_directory(self, number: int) -> Path:
        """The version's directory, made openable as a checkpoint (these versions have no index)."""
        import json

        path = self.directory(number)
        version = Exchange.open(self.exchange_path).version(number)
        weight_map = {entry.name: Path(entry.file).name for entry in version.manifest.tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (path / "config.json").write_text("{}")
        return path

    def check_serves(self, number: int) -> None:
        """The engine holds exactly this version's weights, and the state says so."""
        assert self.state.active_version == number
        assert self.state.state == "serving"
        assert self.engine.tensors == self.weights_of(number)
