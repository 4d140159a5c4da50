"""The exporter's only collectives: agreeing that nobody failed, and telling everybody what one rank knows.

Invariant: every rank leaves `agree` the same way: all go on, or all raise the same PublishError. The control
group is gloo with its own deadline, apart from the training's communicators, so that a rank that died is
noticed after `deadline_s` and not never.
"""

from __future__ import annotations

import datetime
from typing import Any, cast

import torch.distributed as dist

from ..shared.errors import PublishError, UsageError, WeightferryError


class ControlGroup:
    """All ranks of the job, or this one process when nothing is distributed. Collective constructor."""

    def __init__(self, deadline_s: float) -> None:
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            deadline = datetime.timedelta(seconds=deadline_s)
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=deadline))

    @property
    def rank(self) -> int:
        return 0 if self._group is None else dist.get_rank()

    @property
    def world_size(self) -> int:
        return 1 if self._group is None else dist.get_world_size()

    def agree(self, error: Exception | None) -> None:
        """Return if no rank has an error, else raise the lowest failing rank's on every rank.

        A UsageError keeps its class, so that a command still exits 2 for it.
        """
        reports = self._gather(None if error is None else (type(error), describe(error)))
        for rank, report in enumerate(reports):
            if report is None:
                continue
            kind, message = report
            raised = _rebuild(kind, message, rank)
            raise raised from error

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values


def describe(error: Exception) -> str:
    """An error in one line; ours speak for themselves, others need their class."""
    return str(error) if isinstance(error, WeightferryError) else f"{type(error).__name__}: {error}"


def _rebuild(kind: type[Exception], message: str, rank: int) -> Exception:
    return kind(message) if issubclass(kind, UsageError) else PublishError(rank, message)
