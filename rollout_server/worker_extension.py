"""What runs inside each vLLM worker: replacing tensors, and never raising.

Mixed into vLLM's worker by --worker-extension-cls. Every answer is a plain dict; an exception would leave a
tensor-parallel executor out of step for good. Files are read, not mapped: a mapped file that is cut under the
process kills it with SIGBUS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..shared.kill_points import reach
from ..shared.tensor_files import TensorSlot, read_header

if TYPE_CHECKING:
    import torch


class WeightferryWorker:
    """Methods are collective_rpc targets; their names must not be ones that vLLM's workers have."""

    def weightferry_reload(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Replace the named tensors; the caller has checked names, shapes, dtypes and closure."""
        return _reload(self, _Counter(parts, lambda: reach("during-apply")))

    def weightferry_reload_from_zero(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """The same after every weight was set to zero: one that a load leaves out shows afterwards."""
        worker: Any = self
        try:
            for parameter in worker.model_runner.get_model().parameters():
                parameter.data.zero_()
        except BaseException as error:
            return _failed(worker, error)
        return _reload(self, _Counter(parts, lambda: None))

    def weightferry_add_adapter(self, name: str, number: int, directory: str) -> dict[str, Any]:
        """Load an adapter, and name what of it is not bound here; the caller has checked its files."""
        from .engine import adapter_request, unbound_modules

        worker: Any = self
        try:
            if not worker.add_lora(adapter_request(name, number, directory)):
                return _failed(worker, "vLLM did not keep it")
            unbound = unbound_modules(worker, number)
        except BaseException as error:
            return _failed(worker, error)
        return {"ok": True, "rank": worker.rank, "unbound": unbound}

    def weightferry_remove_adapter(self, number: int) -> dict[str, Any]:
        """Forget an adapter that no request uses; one that was evicted already is no error."""
        worker: Any = self
        try:
            worker.remove_lora(number)
        except BaseException as error:
            return _failed(worker, error)
        return {"ok": True, "rank": worker.rank}


def _reload(worker: Any, counted: _Counter) -> dict[str, Any]:
    # A partial reload is what we want: vLLM warns of every tensor that was not in it (0.32).
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    try:
        worker.reload_weights(weights_iterator=iter(counted))
    except BaseException as error:
        from .engine import abort_reload

        abort_reload(worker.model_runner.get_model())
        return _failed(worker, error)
    return {"ok": True, "rank": worker.rank, "num_tensors": counted.num_read}


def _failed(worker: Any, error: object) -> dict[str, Any]:
    words = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    return {"ok": False, "rank": worker.rank, "error": words[:500]}


class _Counter:
    """The tensors of some parts, counted as they are handed over; after each `then` is called."""

    def __init__(self, parts: list[dict[str, Any]], then: Callable[[], None]) -> None:
        self._parts, self._then, self.num_read = parts, then, 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part in self._parts:
            for name, tensor in read_tensors(Path(part["file"]), part["tensors"]):
                yield name, tensor
                self.num_read += 1
                self._then()


def read_tensors(
    path: Path, names: list[str], slots: dict[str, TensorSlot] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Some tensors of a safetensors file, in file order, each in memory of its own.

    `slots` is its header, for who reads it often.
    """
    import torch

    from ..shared.tensor_bytes import TORCH_DTYPES

    slots = read_header(path) if slots is None else slots
    with path.open("rb") as file:
        for name in sorted(names, key=lambda name: slots[name].begin):
            slot = slots[name]
            file.seek(slot.begin)
            data = bytearray(slot.end - slot.begin)
            if file.readinto(data) != len(data):
                raise EOFError(f"{path} was cut while {name} was read")
            flat = torch.frombuffer(data, dtype=TORCH_DTYPES[slot.spec.dtype]) if data else torch.empty(0)
            yield name, flat.reshape(slot.spec.shape)
