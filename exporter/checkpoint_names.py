"""From names and layouts in memory to those of the checkpoint on disk, one unit at a time.

transformers 5 fuses experts and renames when it loads; `revert_weight_conversion` undoes that for a partial
state dict, as long as a whole decoder layer is given at once. It looks shapes up in the model it is given,
which must be free of PEFT's modules: a skeleton on the meta device serves. The order is save_pretrained's
(transformers 5.19, modeling_utils.py): drop ignored keys, drop tied duplicates, revert.
"""

from __future__ import annotations

import copy
import re

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from .layer_clone import original_class


class CheckpointNames:
    """Reverts state dicts of one base model."""

    def __init__(self, base: nn.Module) -> None:
        with torch.device("meta"):
            self._skeleton = original_class(base)(copy.deepcopy(base.config))
        if getattr(base, "_weight_conversions", None) is not None:
            self._skeleton._weight_conversions = base._weight_conversions
        self.tied: dict[str, str] = dict(getattr(base, "all_tied_weights_keys", None) or {})
        ignored = getattr(base, "_keys_to_ignore_on_save", None) or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]

    def revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors under the checkpoint's names and in its layouts (views where possible)."""
        kept = {name: t for name, t in tensors.items() if not any(p.search(name) for p in self._ignored)}
        return dict(revert_weight_conversion(self._skeleton, kept)) if kept else {}
