"""From names and layouts in memory to those of the checkpoint on disk, one unit at a time.

transformers 5 fuses experts and renames when it loads; `revert_weight_conversion` undoes that for a partial
state dict, as long as a whole decoder layer is given at once. It looks shapes up in the model it is given,
which must be free of PEFT's modules: a skeleton on the meta device serves. The order is save_pretrained's
(transformers 5.19, modeling_utils.py): drop ignored keys, drop tied duplicates, revert.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .layer_clone import original_class

# What from_pretrained passes over in every model that rebuilds its rotary frequencies (modeling_utils.py).
_OLD_ROTARY = r"rotary_emb\.inv_freq"


class CheckpointNames:
    """Reverts state dicts of one base model. `tied`: in-memory name of a duplicate -> of the one kept.

    `on_disk`: the checkpoint's names, where they are known. Some old ones (GPT-2's) lack the prefix that
    from_pretrained adds without a conversion of its own, and that save_pretrained would write.
    """

    def __init__(self, base: PreTrainedModel, on_disk: Collection[str] = ()) -> None:
        with torch.device("meta"):
            self._skeleton = original_class(base)(copy.deepcopy(base.config))
        if getattr(base, "_weight_conversions", None) is not None:
            self._skeleton._weight_conversions = base._weight_conversions
        self.tied: dict[str, str] = dict(base.all_tied_weights_keys or {})
        self._on_disk, self._prefix = frozenset(on_disk), f"{base.base_model_prefix}."
        self._unsaved = _patterns(base._keys_to_ignore_on_save)
        self._unloaded = _patterns([*(base._keys_to_ignore_on_load_unexpected or ()), _OLD_ROTARY])

    def revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors under the checkpoint's names and in its layouts (views where possible)."""
        kept = {name: t for name, t in tensors.items() if not any(p.search(name) for p in self._unsaved)}
        reverted = revert_weight_conversion(self._skeleton, kept) if kept else {}
        return {self._as_on_disk(name): tensor for name, tensor in reverted.items()}

    def is_passed_over(self, name: str) -> bool:
        """Whether from_pretrained leaves this checkpoint tensor out of the model by design."""
        return any(pattern.search(name) for pattern in self._unloaded)

    def _as_on_disk(self, name: str) -> str:
        bare = name.removeprefix(self._prefix)
        return bare if name not in self._on_disk and bare in self._on_disk else name


def _patterns(keys: Iterable[str] | None) -> list[re.Pattern[str]]:
    return [re.compile(key) for key in keys or ()]
