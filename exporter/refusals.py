"""What cannot be merged or served right is refused before the first step, with the way out.

Facts by PEFT 0.21: see each reason. Called once, when a Publisher is made.
"""

from __future__ import annotations

from peft import PeftModel
from torch import nn

from ..shared.errors import UnsupportedError

# init_lora_weights values that change the base when the adapter is made (peft/tuners/lora/layer.py).
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "eva_changed")
_QUANTIZED_CLASSES = ("GPTQ", "Eetq", "Linear4bit", "Linear8bitLt", "HQQ", "AWQ", "Aqlm")


def refuse_unmergeable(model: PeftModel) -> None:
    """Raise UnsupportedError for an adapter or base that a merged version cannot be made from."""
    for name in model.active_adapters:
        _refuse_config(name, model.peft_config[name])
    for name, module in model.named_modules():
        _refuse_module(name, module)


def _refuse_config(name: str, config: object) -> None:
    def has(attribute: str) -> bool:
        return bool(getattr(config, attribute, None))

    if has("alora_invocation_tokens"):
        raise UnsupportedError(f"adapter {name!r} is an aLoRA, which cannot be merged; train a plain LoRA")
    if has("arrow_config"):
        raise UnsupportedError(
            f"adapter {name!r} is an Arrow router, which cannot be merged; train a plain LoRA"
        )
    if has("layer_replication"):
        raise UnsupportedError(
            f"adapter {name!r} uses layer_replication: its layers are not the base's; "
            "save the replicated base as a checkpoint first"
        )
    init = str(getattr(config, "init_lora_weights", "")).lower()
    if init.startswith(_BASE_CHANGING_INITS):
        raise UnsupportedError(
            f"adapter {name!r} has init_lora_weights={init!r}, which changes the base when it is made; "
            "the base in training would not be the exchange's. Use init_lora_weights=true."
        )


def _refuse_module(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if any(word in kind for word in _QUANTIZED_CLASSES):
        raise UnsupportedError(
            f"{name} is a quantised {kind}; merged versions need an unquantised base: "
            "load it without quantization"
        )
