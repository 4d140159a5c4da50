"""The adapters merged in place for a while: for people who evaluate the merged model, or hand it on.

    with merged_lora(model):
        evaluate(model)

Invariants. Inside, every weight below an adapter is the exact merge (docs/format.md [4]) in its own storage
dtype, and PEFT's layers are marked as PEFT marks merged ones, so that no adapter acts twice. Afterwards the
model is what it was, bit for bit with `restore="bytes"`, on every rank, whatever happened inside. Publishing
needs none of this: a Publisher never changes the model, and refuses one that is merged in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..shared.errors import ConfigError, MergeError, PublishError, UnsupportedError, WeightferryError
from .collectives import ControlGroup, gather_all
from .in_place import Mark, base_names, held_part, merge_unit, refuse_tied, unmerge_unit
from .layer_clone import all_tensors
from .model_walk import Unit, base_model, peft_model, reshard_all, walk
from .refusals import refuse_merged, refuse_unmergeable, refuse_unreadable

RESTORES = ("bytes", "unmerge")
DEADLINE_S = 3600.0
_RESTORED = "The model is as it was before"
_IN_DOUBT = "Its weights may still be merged: load them again"

T = TypeVar("T")


@contextmanager
def merged_lora(
    model: nn.Module, *, restore: str = "bytes", deadline_s: float = DEADLINE_S
) -> Iterator[nn.Module]:
    """Merge the active adapters into the weights, in place; afterwards take them out again. Collective.

    `model`: a PEFT model, unsharded or under DDP, FSDP1 or FSDP2, between two training steps. Forwards and
    `generate` may run inside; modules that are trained whole (`modules_to_save`) go on acting by themselves.
    Training flags, `requires_grad` and what PEFT calls merged are afterwards as they were.

    `restore="bytes"` keeps the bytes that it overwrites in host memory, on each rank those of its own shard:
    as much as the adapted weights take. They come back exactly, also after an exception inside.
    `restore="unmerge"` keeps nothing and subtracts the update from the rounded weights, which is not exact: a
    weight comes back within one rounding of the merged one. Of a bfloat16 or float16 base (tiny Qwen2, LoRA
    of rank 4) 5 % of the adapted weights are others after one use, and 38 % after a hundred with training in
    between, by 5e-4 and 5e-3 of their norm in bfloat16. The adapters must not change inside.

    `deadline_s`: how long a rank waits for the others, at the end for the slowest evaluation. Raises
    UnsupportedError for what cannot be merged in place, among it adapters that are merged or disabled
    already, and a tied tensor of which adapters change one use. If a rank fails, every other raises
    MergeError, and the model is restored. Inside, PEFT's own merging, unmerging, disabling and choosing of
    adapters is refused, and so is publishing.
    """
    control = ControlGroup(deadline_s)
    try:
        merge = _together(control, lambda: InPlaceMerge(model, restore, control))
        merge.enter()
        failure: BaseException | None = None
        try:
            yield model
        except BaseException as error:
            failure = error
            raise
        finally:
            merge.leave(failure)
    finally:
        control.close()


class InPlaceMerge:
    """One use of `merged_lora`: `enter`, and then `leave` whatever happened."""

    def __init__(self, model: nn.Module, restore: str, control: ControlGroup) -> None:
        if restore not in RESTORES:
            raise ConfigError(f"restore={restore!r}; expected one of {', '.join(RESTORES)}")
        self._root, self._keeps_bytes, self._control = model, restore == "bytes", control
        self._peft = peft_model(model)
        refuse_merged(self._peft)
        _refuse_disabled(self._peft)
        refuse_unmergeable(self._peft)
        refuse_unreadable(model)
        reshard_all(model)
        units = walk(base_model(model))
        self._names = base_names(units)
        self._units = [unit for unit in units if unit.adapted]
        self._saved: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._marks: dict[str, list[Mark]] = {}
        self._trains = [(module, module.training) for module in model.modules()]
        self._requires = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def enter(self) -> None:
        """Merge unit after unit; after a failure anywhere every rank takes out what it has merged."""
        try:
            for unit in self._units:
                _together(self._control, lambda unit=unit: self._merge(unit))
                if not self._keeps_bytes:
                    del self._saved[unit.key]
        except Exception:
            self._take_out()
            raise
        except BaseException:  # interrupted: the other ranks are elsewhere, so nothing collective here
            self._put_back()
            raise
        _guard(self._peft)

    def leave(self, failure: BaseException | None) -> None:
        """Restore the model, and tell every rank if any failed. `failure`: what this one raised inside."""
        _unguard(self._peft)
        if self._keeps_bytes:  # first of all, and whatever the other ranks do
            error = _caught(self._take_out)
            said = self._met(error or failure)
        else:  # by arithmetic it takes all ranks
            said = self._met(failure)
            error = _caught(self._take_out)
        if isinstance(error, MergeError):
            raise error
        if error is not None:
            raise MergeError(self._control.rank, str(error), _IN_DOUBT) from error
        if said is not None and failure is None:
            raise said

    def _merge(self, unit: Unit) -> None:
        gathered = gather_all(_adapted_tensors(unit), keep=True)
        changes, marks = merge_unit(unit, gathered, is_reversible=not self._keeps_bytes)
        refuse_tied(changes, self._names)
        saved = self._saved.setdefault(unit.key, [])
        self._marks[unit.key] = marks
        for change in changes:
            saved.append((change.tensor, held_part(change.tensor).to("cpu", copy=True)))
            change.write()
        for mark in marks:
            mark.set()

    def _take_out(self) -> None:
        reshard_all(self._root)
        self._put_back()
        if self._marks:  # a rank that died would be waited for inside a collective of the training's own
            _together(self._control, lambda: None, _IN_DOUBT)
        for unit in reversed(self._units):
            if unit.key in self._marks:
                _together(self._control, lambda unit=unit: self._subtract(unit), _IN_DOUBT)
        for module, trains in self._trains:
            module.training = trains
        for parameter, requires in self._requires:
            parameter.requires_grad_(requires)

    def _put_back(self) -> None:
        """Undo the units whose bytes are here."""
        for key, saved in self._saved.items():
            for tensor, held in saved:
                held_part(tensor).copy_(held)
            for mark in self._marks.pop(key, []):
                mark.remove()
        self._saved.clear()

    def _subtract(self, unit: Unit) -> None:
        """Undo one unit by arithmetic."""
        gathered = gather_all(_adapted_tensors(unit), keep=True)
        for change in unmerge_unit(unit, gathered, self._marks[unit.key]):
            change.write()
        for mark in self._marks.pop(unit.key):
            mark.remove()

    def _met(self, failure: BaseException | None) -> Exception | None:
        """What all ranks raise if any of them failed inside; returns when all are here."""
        if self._control.world_size == 1:
            return None
        try:
            self._control.agree(cast(Exception, failure))
        except PublishError as error:
            return MergeError(error.rank, error.cause, _RESTORED)
        except WeightferryError as error:
            return error
        return None


def _adapted_tensors(unit: Unit) -> list[torch.Tensor]:
    tensors = (tensor for _, module in unit.adapted for tensor in all_tensors(module))
    return list({id(tensor): tensor for tensor in tensors}.values())


def _refuse_disabled(peft: PeftModel) -> None:
    for name, module in peft.named_modules():
        if isinstance(module, BaseTunerLayer) and module.disable_adapters:
            raise UnsupportedError(
                f"the adapters of {name} are disabled, so that the model answers as its base; enable them "
                "(model.base_model.enable_adapter_layers()) before you merge them"
            )


def _guard(peft: PeftModel) -> None:
    """PEFT would unmerge by itself to disable or choose an adapter: by arithmetic, and on FSDP's copies."""
    for module in _peft_modules(peft):
        module.__dict__ |= {"merge": _refuse, "unmerge": _refuse, "set_adapter": _refuse}
        module.__dict__["enable_adapters"] = _refuse_disabling


def _unguard(peft: PeftModel) -> None:
    for module in _peft_modules(peft):
        for name in ("merge", "unmerge", "set_adapter", "enable_adapters"):
            module.__dict__.pop(name, None)


def _peft_modules(peft: PeftModel) -> list[nn.Module]:
    return [m for m in peft.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _refuse(*_: Any, **__: Any) -> None:
    raise UnsupportedError(
        "inside merged_lora the adapters are part of the weights; merge, unmerge, disable or choose adapters "
        "after it has ended"
    )


def _refuse_disabling(enabled: bool) -> None:
    """PEFT enables again on its way out of a failed `disable_adapter`: nothing to do, they never were."""
    if not enabled:
        _refuse()


def _together(control: ControlGroup, act: Callable[[], T], outcome: str = _RESTORED) -> T:
    """`control.together` in this context's words."""
    try:
        return control.together(act)
    except PublishError as error:
        raise MergeError(error.rank, error.cause, outcome) from error.__cause__


def _caught(act: Callable[[], None]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None
