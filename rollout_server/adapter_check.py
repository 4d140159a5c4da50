"""Checks of a staged adapter that vLLM does not make: it accepts wrong shapes, ranks and NaN without a word.

Facts: vLLM 0.32, lora/lora_model.py and peft_helper.py. Every module that the manifest names must be there
with both factors, in the shapes that the base and the rank demand, finite.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..shared.errors import ApplyError
from ..shared.manifest import AdapterEntry
from ..shared.tensor_files import TensorSpec, read_header
from .worker_extension import read_tensors

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_PREFIX = "base_model.model."


def check_adapter(directory: Path, entry: AdapterEntry, base: dict[str, TensorSpec]) -> int:
    """Raise ApplyError unless the directory holds the manifest's adapter whole; returns its tensor count."""
    _check_config(json.loads((directory / CONFIG_NAME).read_bytes()))
    specs = {name: slot.spec for name, slot in read_header(directory / WEIGHTS_NAME).items()}
    expected: dict[str, tuple[int, ...]] = {}
    for module in entry.modules:
        weight = base.get(f"{module.name}.weight")
        if weight is None or len(weight.shape) != 2:
            raise ApplyError(
                f"the adapter targets {module.name}, which is no linear layer of the base: use --apply merged"
            )
        size_out, size_in = weight.shape
        expected[f"{_PREFIX}{module.name}.lora_A.weight"] = (module.rank, size_in)
        expected[f"{_PREFIX}{module.name}.lora_B.weight"] = (size_out, module.rank)
    for name in sorted(expected.keys() | specs.keys()):
        found = specs[name].shape if name in specs else None
        if expected.get(name) != found:
            raise ApplyError(f"adapter tensor {name}: shape {expected.get(name)} expected, {found} found")
    _check_finite(directory / WEIGHTS_NAME, list(specs))
    return len(specs)


def _check_config(config: dict) -> None:
    """What vLLM's adapters cannot do, or do silently wrong: say so before it fails in its own words."""
    if config.get("peft_type") != "LORA":
        raise ApplyError(f"vLLM takes LoRA for granted, this adapter is {config.get('peft_type')}: use LoRA")
    if config.get("bias", "none") != "none":
        raise ApplyError("vLLM cannot serve an adapter with biases: serve with --apply merged")
    refused = {
        "use_dora": "DoRA",
        "lora_bias": "lora_bias",
        "modules_to_save": "modules_to_save",
        "trainable_token_indices": "trainable tokens",
        "target_parameters": "target_parameters",
        "alora_invocation_tokens": "aLoRA",
    }
    for key, words in refused.items():
        if config.get(key):
            raise ApplyError(f"vLLM cannot serve an adapter with {words}: serve with --apply merged")


def _check_finite(path: Path, names: list[str]) -> None:
    for name, tensor in read_tensors(path, names):
        if not tensor.isfinite().all():
            raise ApplyError(f"adapter tensor {name} is not finite: the training diverged")
