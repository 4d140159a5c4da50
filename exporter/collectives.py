"""The exporter's only collectives: gathering tensors, agreeing that nobody failed, telling what rank 0 knows.

Invariants. Every rank leaves `agree` the same way: all go on, or all raise the same error, naming the rank
and its cause. `gather_all` goes through its whole list on every rank, also after an error, so that a rank
that failed never leaves the others waiting inside a collective of the training's own communicator.

A good meeting costs one integer over gloo, on a group of its own. In trouble every rank says what it knows
through the job's key-value store, which outlives a rank; whoever still says nothing died or hangs.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from ..shared import errors
from ..shared.errors import PublishError, UsageError, WeightferryError
from . import fsdp1

SETTLE_S = 20.0
_POLL_S = 0.05

T = TypeVar("T")


def gather_all(tensors: Iterable[torch.Tensor], *, keep: bool) -> dict[int, torch.Tensor]:
    """The whole tensors in their storage dtypes, by id() of the given ones; collective for sharded ones.

    Every rank gives the same tensors in the same order. With `keep` false they are dropped at once. The first
    error is raised after the last tensor. An unshard()ed copy would not do: it has FSDP's compute dtype.
    """
    return gather_dealt([(tensors, keep)])


def gather_dealt(lists: Iterable[tuple[Iterable[torch.Tensor], bool]]) -> dict[int, torch.Tensor]:
    """As `gather_all`, for several lists, each with its own `keep`."""
    gathered: dict[int, torch.Tensor] = {}
    failure: Exception | None = None
    for tensor, keep in ((tensor, keep) for tensors, keep in lists for tensor in tensors):
        try:
            whole = _whole(tensor)
            if keep and failure is None:
                gathered[id(tensor)] = whole.detach()
        except Exception as error:  # the other ranks are in the next tensor's collective already
            failure = failure or error
    if failure is not None:
        raise failure
    return gathered


@contextmanager
def gathered_in_turn(tensors: Iterable[torch.Tensor]) -> Iterator[Iterator[torch.Tensor]]:
    """As `gather_all`, one whole tensor after the other as they are asked for: only one need live at a time.

    Leaving the block, also by an error, gathers what was not asked for, for the other ranks.
    """
    rest = iter(tensors)
    try:
        yield (_whole(tensor).detach() for tensor in rest)
    finally:
        gather_all(rest, keep=False)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if (place := fsdp1.place_of(tensor)) is not None:
        return fsdp1.whole(tensor, place)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ControlGroup:
    """All ranks of the job, or this one process when nothing is distributed. Collective constructor.

    `deadline_s`: how long a rank waits for the others. After a rank has died or missed it, the group is
    broken for good, and every later meeting fails at once.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s, self._num_meetings = deadline_s, 0
        self._group: dist.ProcessGroup | None = None
        self._broken_by: PublishError | None = None
        self._told_key = ""
        self.rank, self.world_size = 0, 1
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        deadline = datetime.timedelta(seconds=deadline_s)
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=deadline))
        # torch 2.13 has no public way to the store of the default group; torchrun's agent keeps it alive
        store = distributed_c10d._get_default_store()
        prefix = f"weightferry/{self._group.group_name}"
        self._store = distributed_c10d.PrefixStore(prefix, store)

    def together(self, act: Callable[[], T]) -> T:
        """Run something on this rank, then agree that it failed nowhere."""
        error, result = None, None
        try:
            result = act()
        except Exception as caught:
            error = caught
        self.agree(error)
        return cast(T, result)

    def agree(self, error: Exception | None) -> None:
        """Return if no rank has an error; else raise the lowest failing rank's on every rank.

        A UsageError keeps its class, so that a command still exits 2 for it; all else is a PublishError.
        """
        if self.world_size == 1:
            if error is not None:
                raise _rebuild(0, _word(error)) from error
            return
        self._begin_meeting()
        if self._anybody(error is not None):
            raise self._settle(error) from error

    def from_first(self, act: Callable[[], Any]) -> Any:
        """The JSON value that `act` returns on rank 0, or its error, on every rank.

        Rank 0 has it even if the others are lost meanwhile: what it has done, it has done.
        """
        if self.world_size == 1:
            return self.together(act)
        self._begin_meeting()
        key, earlier, told = f"{self._num_meetings}/told", self._told_key, None
        self._told_key = key
        if self.rank == 0:
            told = _outcome(act)
            self._store.set(key, json.dumps(told))
        self._anybody(False)
        if earlier and self.rank == 0:  # whoever is in this meeting has heard what was told in earlier ones
            self._store.delete_key(earlier)
        if told is None:
            if self._is_broken and not self._store.check([key]):
                raise self._settle(None)
            told = json.loads(self._store.get(key))
        if "error" in told:
            raise _rebuild(0, told["error"])
        return told["value"]

    def to_first(self, act: Callable[[], Any]) -> list[Any]:
        """The JSON values that `act` returns on the ranks, in their order; only for rank 0, others get none.

        An error of one rank is everybody's.
        """
        if self.world_size == 1:
            return [self.together(act)]
        meeting = f"{self._num_meetings + 1}"
        keys = [f"{meeting}/record/{rank}" for rank in range(self.world_size)]
        self.together(lambda: self._store.set(keys[self.rank], json.dumps(act())))
        if self.rank != 0:
            return []
        values = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return values

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _begin_meeting(self) -> None:
        if self._broken_by is not None:
            raise PublishError(self._broken_by.rank, f"{self._broken_by.cause} (earlier; restart the job)")
        self._num_meetings += 1

    def _anybody(self, is_so: bool) -> bool:
        """Whether it is so on any rank; True, and the group is left, if the ranks lost each other."""
        flag = torch.tensor([int(is_so)])
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:  # gloo: a peer's connection closed, or the deadline passed
            self.close()
            self._broken_by = PublishError(
                self.rank, f"it lost the other ranks ({str(error).splitlines()[0]})"
            )
            return True
        return bool(flag.item())

    @property
    def _is_broken(self) -> bool:
        return self._broken_by is not None

    def _settle(self, error: Exception | None) -> Exception:
        """The one error of all ranks: everybody says its word, and the first to know them all decides."""
        meeting = f"{self._num_meetings}"
        keys = [f"{meeting}/word/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(_word(error)))
        missing, late, verdict = set(keys), {keys[self.rank]}, f"{meeting}/verdict"
        deadline = time.monotonic() + (SETTLE_S if self._is_broken else self._deadline_s)
        while missing and not self._store.check([verdict]) and time.monotonic() < deadline:
            missing = {key for key in missing if not self._store.check([key])}
            late = missing or late
            time.sleep(_POLL_S if missing else 0)
        words = [None if key in missing else json.loads(self._store.get(key)) for key in keys]
        if (
            self._is_broken and not missing and not any(words)
        ):  # nobody died and nobody failed: somebody was late
            words = [_late(self._deadline_s) if key in late else {} for key in keys]
        rank, word = json.loads(self._store.compare_set(verdict, "", json.dumps(_blame(words))))
        settled = _rebuild(rank, word)
        if self._is_broken:
            self._broken_by = (
                settled if isinstance(settled, PublishError) else PublishError(rank, str(settled))
            )
        return settled


def _late(deadline_s: float) -> dict[str, str]:
    return {"kind": "", "message": f"it was later than the others by more than {deadline_s:.0f} s"}


def _blame(words: list[dict[str, str] | None]) -> tuple[int, dict[str, str] | None]:
    """The rank to name, and its word: a silent one before all others, whose errors may follow from it."""
    silent = [rank for rank, word in enumerate(words) if word is None]
    failed = [rank for rank, word in enumerate(words) if word]
    rank = (silent or failed or [0])[0]
    return rank, words[rank]


def _word(error: Exception | None) -> dict[str, str]:
    """What a rank says of itself, in one line; empty if it has nothing to complain about."""
    if error is None:
        return {}
    if isinstance(error, PublishError):
        return {"kind": "PublishError", "message": error.cause}
    own = isinstance(error, WeightferryError)
    message = str(error) if own else f"{type(error).__name__}: {error}"
    return {"kind": type(error).__name__ if own else "", "message": message}


def _outcome(act: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": act()}
    except Exception as error:
        return {"error": _word(error)}


def _rebuild(rank: int, word: dict[str, str] | None) -> Exception:
    if word is None:
        return PublishError(rank, "it died, or hangs: it said nothing")
    kind = getattr(errors, word.get("kind", "") or "PublishError", PublishError)
    if issubclass(kind, UsageError):
        return kind(word["message"])
    return PublishError(rank, word.get("message", "the ranks lost each other, none of them has an error"))
