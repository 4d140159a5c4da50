"""The ranks of a training job: this process's place among them, its device, and what they agree on.

Invariant: every method here is called by all ranks in the same order. A failure of rank 0 in `from_first`
reaches the others as the same message, instead of leaving them in a wait. Values cross as numbers and JSON.
One process without torchrun is a world of one rank; everything else is the same code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..shared.errors import ConfigError, WeightferryError

T = TypeVar("T")


class Ranks:
    """All ranks of the job, seen from this one; use as a context manager."""

    def __init__(self, *, timeout_s: float) -> None:
        self.device = _own_device()
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        wait = timedelta(seconds=timeout_s)
        if "RANK" in os.environ:  # torchrun sets it, and where to meet
            dist.init_process_group(backend, timeout=wait)
        else:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  (public, but not in __all__)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=wait)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the peers may be inside a collective: leaving them to torchrun ends them sooner.
        if kind is None:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mesh(self) -> DeviceMesh:
        """All ranks in one row, over which the model is sharded."""
        return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))

    def from_first(self, act: Callable[[], T]) -> T | None:
        """Run `act` on rank 0; its result there, None elsewhere. Its error is raised on every rank."""
        result, failure = None, None
        if self.is_first:
            try:
                result = act()
            except Exception as error:  # of any kind: the others wait for an answer
                failure = error
        told = self._broadcast(_told(failure))
        if failure is not None:
            raise failure
        if told:
            raise _heard(told)
        return result

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def _broadcast(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0)
        if not size.item():
            return b""
        content = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.is_first:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(content, src=0)
        return bytes(content.tolist())


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this machine shows {torch.cuda.device_count()}; "
            "start at most as many ranks with --nproc-per-node"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _told(failure: Exception | None) -> bytes:
    """An error for the other ranks; empty for none."""
    if failure is None:
        return b""
    exit_code = failure.exit_code if isinstance(failure, WeightferryError) else WeightferryError.exit_code
    message = str(failure) if isinstance(failure, WeightferryError) else f"rank 0 failed: {failure!r}"
    return json.dumps({"message": message, "exit_code": exit_code}).encode()


def _heard(told: bytes) -> WeightferryError:
    content = json.loads(told)
    error = WeightferryError(content["message"])
    error.exit_code = content["exit_code"]
    return error
