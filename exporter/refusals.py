"""What cannot be merged or served right is refused before the first step, with the way out.

Facts by PEFT 0.21: see each reason. Called once, when a Publisher is made. What no rule here knows is tried:
one module of each kind is merged before the publisher is accepted.
"""

from __future__ import annotations

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..shared.errors import UnsupportedError
from ..shared.lora_starts import RESIDUAL_STARTS, UNTRIED_STARTS
from . import fsdp1
from .layer_clone import Gathered, base_of, merged_state
from .model_walk import Unit

_QUANTIZED_CLASSES = ("GPTQ", "Eetq", "Linear4bit", "Linear8bitLt", "HQQ", "AWQ", "Awq", "Aqlm", "INC")
_OR_ADAPTER = 'train a plain LoRA, or publish the adapter alone (publish="adapter")'


def refuse_unreadable(model: nn.Module) -> None:
    """Raise UnsupportedError where the model's tensors cannot be had whole, or are not weights."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, FullyShardedDataParallel) and (reason := fsdp1.why_unreadable(module)):
            raise UnsupportedError(f"{name or 'the model'} {reason}")
        if any(word in kind for word in _QUANTIZED_CLASSES):
            raise UnsupportedError(
                f"{name} is a quantised {kind}: the base in training is not the exchange's; "
                "load it without quantization"
            )
    if foreign := fsdp1.foreign_parameters(model):
        raise UnsupportedError(
            f"{foreign[0]} belongs to an FSDP1 unit around this model; give the outermost wrapped module"
        )


def refuse_merged(peft: PeftModel) -> None:
    """Raise UnsupportedError if an adapter is part of its weights now: they would be taken for the base's."""
    for name, module in peft.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise UnsupportedError(
                f"the adapters of {name} are merged in place; do this after the merged_lora around it has "
                "ended, or after model.unmerge_adapter()"
            )


def refuse_foreign_base(peft: PeftModel) -> None:
    """Raise UnsupportedError where the base in training cannot be the exchange's."""
    for name in peft.peft_config:
        if (init := _init(peft, name)).startswith(UNTRIED_STARTS):
            raise UnsupportedError(
                f"adapter {name!r} has init_lora_weights={init!r}, which changes the base when it is made; "
                "the base in training would not be the exchange's. Use init_lora_weights=true."
            )


def refuse_residual_adapter(peft: PeftModel) -> None:
    """Raise UnsupportedError for an adapter that fits only what its making left of the base."""
    for name in sorted(residual_adapters(peft)):
        raise UnsupportedError(
            f"adapter {name!r} has {_residual_start(peft, name)}, which changes the base when it "
            "is made: on the exchange's base it would answer wrong. Use init_lora_weights=true without "
            'kasa_config, or publish the merged weights alone (publish="merged")'
        )


def residual_adapters(peft: PeftModel) -> set[str]:
    """Adapters, active or not, that took a part out of the base's weights when they were made."""
    return {name for name in peft.peft_config if _residual_start(peft, name)}


def _residual_start(peft: PeftModel, adapter: str) -> str:
    """The setting by which an adapter takes a part out of the base; empty if it does not."""
    if getattr(peft.peft_config[adapter], "kasa_config", None):  # peft/tuners/lora/variants.py
        return "kasa_config"
    init = _init(peft, adapter)
    return f"init_lora_weights={init!r}" if init.startswith(RESIDUAL_STARTS) else ""


def _init(peft: PeftModel, adapter: str) -> str:
    return str(getattr(peft.peft_config[adapter], "init_lora_weights", "")).lower()


def refuse_unmergeable(peft: PeftModel) -> None:
    """Raise UnsupportedError for an adapter that no merged version can be made from."""
    for name in peft.active_adapters:
        config = peft.peft_config[name]
        if reason := _why_unmergeable(config):
            raise UnsupportedError(f"adapter {name!r} {reason}")
    for name, module in peft.named_modules():
        has_bias = any(getattr(module, "lora_bias", {}).values())
        if has_bias and getattr(base_of(module), "bias", None) is None:
            raise UnsupportedError(
                f"{name} has no bias that lora_bias=True could be merged into; leave it out of "
                f'target_modules, set lora_bias=False, or publish="adapter"'
            )


class MergeTrial:
    """Merges the first module of each kind, for the tuners and variants that no rule knows."""

    def __init__(self) -> None:
        self._tried: set[tuple] = set()

    def refuse_failing(self, unit: Unit, gathered: Gathered) -> None:
        """Raise UnsupportedError with PEFT's own reason."""
        for prefix, module in unit.adapted:
            variants = getattr(module, "lora_variant", {})
            kind = (type(module), *sorted({type(variant).__name__ for variant in variants.values()}))
            if kind in self._tried:
                continue
            self._tried.add(kind)
            try:
                merged_state(module, gathered)
            except Exception as error:
                what = f"{prefix.rstrip('.')} ({type(module).__name__})"
                raise UnsupportedError(f"PEFT cannot merge {what}: {error}; {_OR_ADAPTER}") from error


def _why_unmergeable(config: object) -> str:
    def has(attribute: str) -> bool:
        return bool(getattr(config, attribute, None))

    if has("alora_invocation_tokens"):
        return f"is an aLoRA, which cannot be merged; {_OR_ADAPTER}"
    if has("arrow_config"):
        return f"is an Arrow router, which cannot be merged; {_OR_ADAPTER}"
    if has("is_prompt_learning"):
        return f"learns prompts, which cannot be merged; {_OR_ADAPTER}"
    if has("layer_replication"):
        return (
            "uses layer_replication: its layers are not the base's; save the replicated base as a "
            "checkpoint first, and train on that"
        )
    return ""
